"""The order of a pipeline's messages: what NCCL would make of it, how long ranks are idle, what is sent."""

from collections import Counter, defaultdict, deque
from typing import Any, NamedTuple

import pytest
import torch

from distributed.pipeline import Ring, circulate
from tests.ranks import REPOSITORY


class _Call(NamedTuple):
    """What a rank does: send, receive, wait or work. other: the peer, or the number of the awaited call."""

    kind: str
    other: int = -1
    with_owner: bool = False
    slots: int = 0


class _Recorder(Ring):
    """A ring that notes what it is asked for."""

    def __init__(self, stage: int, size: int):
        self.stage, self.size, self.calls, self._sends = stage, size, [], []

    def send(self, tensor: torch.Tensor, goal: int, *, with_owner: bool) -> None:
        self._sends.append(len(self.calls))
        self.calls.append(_Call("send", goal, with_owner))

    def receive(self, like: torch.Tensor, source: int, *, with_owner: bool) -> Any:
        number = len(self.calls)
        self.calls.append(_Call("receive", source, with_owner))

        def wait() -> torch.Tensor:
            self.calls.append(_Call("wait", number))
            return like

        return wait

    def finish_sends(self) -> None:
        self.calls += [_Call("wait", number) for number in self._sends]
        self._sends.clear()


def _programs(size: int, num_forward: int, num_backward: int) -> list[list[_Call]]:
    """Returns what each rank does in a step of so many calls of levels, of which the last carry gradient."""
    rings = [_Recorder(stage, size) for stage in range(size)]
    for ring in rings:
        for is_forward in [True] * num_forward + [False] * num_backward:

            def work(_: int, received: torch.Tensor, calls: list = ring.calls, slots: int = 2 - is_forward):
                calls.append(_Call("work", slots=slots))
                return received

            circulate(ring, torch.zeros(1), work, forward=is_forward)
    return [ring.calls for ring in rings]


def _ends_on_nccl(programs: list[list[_Call]], *, num_groups: int) -> bool:
    """Whether all calls come to their end where messages of two ranks in a group go in the order of calls.

    A message goes once both sides have done the work that they were asked for before; work waits for what it
    is told to wait for.
    """
    done: list[set[int]] = [set() for _ in programs]
    queues = defaultdict(deque)
    for rank, calls in enumerate(programs):
        for number, call in enumerate(calls):
            if call.kind in ("send", "receive"):
                queues[rank, call.other, call.with_owner and num_groups > 1].append(number)

    def has_worked(rank: int, until: int) -> bool:
        return all(n in done[rank] for n in range(until) if programs[rank][n].kind in ("wait", "work"))

    moves = True
    while moves:
        moves = False
        for rank, calls in enumerate(programs):
            for number, call in enumerate(calls):
                is_ready = call.kind == "work" or (call.kind == "wait" and call.other in done[rank])
                if number not in done[rank] and is_ready and has_worked(rank, number):
                    done[rank].add(number)
                    moves = True
        for (rank, peer, group), queue in queues.items():
            other = queues[peer, rank, group]
            if not (queue and other and has_worked(rank, queue[0]) and has_worked(peer, other[0])):
                continue
            if {programs[rank][queue[0]].kind, programs[peer][other[0]].kind} == {"send", "receive"}:
                done[rank].add(queue.popleft())
                done[peer].add(other.popleft())
                moves = True
    return all(len(calls) == len(finished) for calls, finished in zip(programs, done, strict=True))


def _receiving_late(calls: list[_Call]) -> list[_Call]:
    """Returns the calls with each receive right before it is waited for."""
    late, numbers = [], {}
    for number, call in enumerate(calls):
        if call.kind == "receive":
            continue
        if call.kind == "wait":
            if call.other not in numbers:
                numbers[call.other] = len(late)
                late.append(calls[call.other])
            call = call._replace(other=numbers[call.other])
        numbers[number] = len(late)
        late.append(call)
    return late


@pytest.mark.parametrize("size", [2, 3, 4])
def test_on_nccl_no_message_waits_forever(size):
    programs = _programs(size, 3, 2)
    assert _ends_on_nccl(programs, num_groups=2)
    late = [_receiving_late(calls) for calls in programs]
    assert _ends_on_nccl(late, num_groups=2), "two groups end whenever receives are called"
    assert not _ends_on_nccl(late, num_groups=1)


def _idle_share(programs: list[list[_Call]]) -> float:
    """Counts slots: a forward pass of a stage is one, its backward pass two; messages take no time."""
    clocks, at = [0] * len(programs), [0] * len(programs)
    on_the_way = defaultdict(deque)
    while any(number < len(calls) for number, calls in zip(at, programs, strict=True)):
        for rank, calls in enumerate(programs):
            while at[rank] < len(calls):
                call = calls[at[rank]]
                if call.kind == "send":
                    on_the_way[rank, call.other, call.with_owner].append(clocks[rank])
                elif call.kind == "wait" and calls[call.other].kind == "receive":
                    awaited = calls[call.other]
                    if not (queue := on_the_way[awaited.other, rank, awaited.with_owner]):
                        break
                    clocks[rank] = max(clocks[rank], queue.popleft())
                clocks[rank] += call.slots
                at[rank] += 1
    busy = sum(call.slots for calls in programs for call in calls)
    return 1 - busy / (len(programs) * max(clocks))


# Calls of levels in a step, and of those with gradient, at published cycles: docs/parallel.md.
_CALLS = {"hrm": (12, 2), "trm": (21, 7), "urm": (12, 6), "serrm": (18, 6), "transformer": (1, 1)}


def test_idle_shares_are_those_of_the_formula_and_of_the_page():
    page = (REPOSITORY / "docs" / "parallel.md").read_text()
    for forward, backward in _CALLS.values():
        shares = []
        for size in (2, 4, 8):
            ends = 3 * (size - 1)
            expected = ends / (size * (forward + 2 * backward) + ends)
            shares.append(_idle_share(_programs(size, forward, backward)))
            assert shares[-1] == pytest.approx(expected, abs=1e-12)
        assert " | ".join(f"{100 * share:.1f} %" for share in shares) in page


def test_a_call_sends_as_many_messages_as_there_are_stages():
    """And one more from each stage between the ends; none to itself."""
    for size in (2, 4):
        counts = [Counter(call.kind for call in calls) for calls in _programs(size, 1, 0)]
        assert [each["send"] for each in counts] == [each["receive"] for each in counts]
        assert [each["send"] for each in counts] == [size, *[size + 1] * (size - 2), size]

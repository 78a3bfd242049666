"""The watchdog: ends all ranks if one hangs or is lost, and reports which rank, and where in the code.

Every rank writes a heartbeat into the key-value store twice a second. Rank 0 reads the heartbeats of all
ranks. Other ranks read only those of rank 0 and their own, to keep the load of the store low. If a rank finds
that a heartbeat is missing, or makes no progress itself, the rank sets the alarm in the store. Then all ranks
read all heartbeats, print a report, and end. If no Python thread of a rank can run, a helper process kills
the rank (`distributed.backstop`).

One thread exchanges heartbeats. Another thread watches the clock and never waits. Two threads are needed,
because a call to the store ignores its timeout while the process that serves the store is suspended.
"""

import contextlib
import dataclasses
import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Store

from distributed import log
from distributed.backstop import Backstop, is_stopped
from distributed.errors import restart_advice
from distributed.failure_record import FailureRecord
from distributed.world import (
    agent_serves_store,
    connect_store,
    is_main,
    local_rank,
    num_nodes,
    rank,
    world_size,
)

EXIT_HANG = 124  # exit status of a rank that the watchdog ends, as of the command `timeout`

_TICK_SECONDS = 0.5
# The next four are in ticks. A rank ends about 7 s after the timeout.
_SILENCE_TICKS = 5  # after this time without a heartbeat, the report calls a rank "not responding"
_ANSWER_TICKS = 7  # from the alarm to the report, so that all ranks can write heartbeats
_EXIT_TICKS = 3  # from the report to the exit, because torchrun ends all ranks when the first one exits
_BACKSTOP_TICKS = 16  # from the timeout to the kill of a process in which Python threads cannot run

_REPOSITORY = str(Path(__file__).resolve().parent.parent) + os.sep
_MAX_GROUPS = 8  # groups of ranks in one line


@dataclasses.dataclass(frozen=True)
class _Heartbeat:
    """What one rank reports about itself twice a second.

    Attributes:
        time: Time on the clock of the rank, in seconds. Other ranks only see whether it has changed, because
            clocks differ.
        step: Number of training steps done. None before the first step is done.
        state: What the rank does, with the line of code, as text.
        is_paused: Whether this rank need not make progress now, because it evaluates or saves. In rank 0's
            heartbeat, whether this is true of any rank.
        has_left: Whether the rank has left the watchdog's block. Missing heartbeats are then not a failure.
    """

    time: float
    step: int | None
    state: str
    is_paused: bool
    has_left: bool


class Watchdog:
    """Context manager that ends all ranks if one of them hangs or is lost.

    With one rank, it ends nothing. Every rank must finish its first training step within
    init_timeout_seconds, and each later step within step_timeout_seconds. While any rank is inside a `paused`
    block, no rank has a time limit for its steps. If a rank exceeds its limit, or writes no heartbeat for the
    same time, every rank prints the stacks of its threads and exits with status 124.

    Time in which this process was suspended (SIGSTOP) does not count.
    """

    def __init__(self, *, init_timeout_seconds: float, step_timeout_seconds: float):
        self._init_timeout, self._step_timeout = init_timeout_seconds, step_timeout_seconds
        # Written by the thread that enters the block.
        self._step: int | None = None
        self._pauses = self._progress = 0
        self._end = ""  # how the block was left
        self._record: FailureRecord | None = None
        self._on_hang: Callable[[], None] | None = None
        # Written by the thread that exchanges heartbeats. {rank: (newest heartbeat, when it was first read)}.
        self._heard: dict[int, tuple[_Heartbeat, float]] = {}
        self._answered_at, self._store_error = 0.0, ""
        self._waiting_since: float | None = None  # start of the call to the store that has not returned
        self._alarm = ""  # why all ranks must end, read from the store
        # Written by the thread that watches the clock; in seconds in which this process was not stopped.
        self._now = self._progressed_at = 0.0
        self._found = ""  # why all ranks must end, found by this rank
        self._agent_is_stopped = False
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def keep_record(self, path: Path, *, on_hang: Callable[[], None] | None = None) -> None:
        """Keeps a file from which the next launch of the run computes the recovery time after a failure.

        Rank 0 calls it before the first training step. With one rank, the file is not written.

        path: Path of the file (`distributed.failure_record`).
        on_hang: Function that a thread of the watchdog calls after the report, before it ends this process.
            The process ends after 1.5 s even if the function has not returned.
        """
        self._record, self._on_hang = FailureRecord(path), on_hang

    def step_done(self, step: int) -> None:
        """Records that this rank makes progress. Call it after every training step.

        step: Number of training steps done.
        """
        if self._record:
            self._record.record_recovery(step)
            if self._threads and self._step is None:  # write now: the process may fail before the next tick
                self._record.write(step, silent_seconds=0)
        self._step = step
        self._progress += 1

    def is_alarmed(self) -> bool:
        """Returns whether a hanging or lost rank was found.

        This rank will then print a report and exit within seconds.
        """
        return bool(self._alarm or self._found)

    def pop_recovery(self) -> dict[str, float]:
        return self._record.pop_recovery() if self._record else {}

    def is_paused(self) -> bool:
        """Returns whether any rank is inside a `paused` block.

        While True, no rank needs to make progress. A change on another rank is visible about a second later.
        """
        return self._pauses > 0 or self._others_are_paused()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager for work between training steps, such as an evaluation or a save.

        During the block, no rank needs to make progress.
        """
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            self._progress += 1

    def __enter__(self) -> "Watchdog":
        if world_size() > 1:
            self._watched_thread = threading.get_ident()
            self._backstop = Backstop()
            for task in (self._exchange, self._watch):
                self._threads.append(threading.Thread(target=task, daemon=True))
                self._threads[-1].start()
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        self._end = f"ended with {error_type.__name__}" if error_type else "ended"
        # An error after an alarm is only a consequence. Wait for the report: it ends this process.
        must_report = error_type is not None and self.is_alarmed()
        if not must_report:
            self._stop.set()
        for thread in reversed(self._threads):
            thread.join(None if must_report else 4 * _TICK_SECONDS)  # the store may never answer
        if error_type is None and self._record:
            self._record.remove()

    def _give_up(self) -> None:
        # An exception in a watchdog thread ends the watchdog, not the run. The last heartbeat says so.
        traceback.print_exc()
        log.warning("the watchdog failed. The run continues, but if a process hangs, nothing will end it.")
        self._end = "no longer watched"
        self._stop.set()

    # --- The thread that exchanges heartbeats ---

    def _exchange(self) -> None:
        store, is_first, is_last = None, True, False
        while not is_last:
            is_last = self._stop.wait(0 if is_first else _TICK_SECONDS)
            is_first = False
            try:
                store = store or self._ask(connect_store)
                self._exchange_once(store, has_left=is_last)
                self._store_error = ""
            except RuntimeError as error:  # connection lost: try again until the time limit
                store, self._store_error = None, f" ({str(error).partition(chr(10))[0]})"
            except Exception:
                self._give_up()

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        # Count only the time within calls: between calls, the machine may just be busy.
        if self._waiting_since is None:
            self._waiting_since = self._now
        answer = call(*arguments)
        if self._agent_is_stopped:  # it runs again: no heartbeat could be written or read meanwhile
            self._heard = {number: (heard, self._now) for number, (heard, _) in self._heard.items()}
            self._agent_is_stopped = False
        self._answered_at, self._waiting_since = self._now, None
        return answer

    def _exchange_once(self, store: Store, *, has_left: bool) -> None:
        is_paused = self._pauses > 0 or (is_main() and self._others_are_paused())
        heartbeat = _Heartbeat(time.monotonic(), self._step, self._state(), is_paused, has_left)
        self._ask(store.set, _key(rank()), json.dumps(dataclasses.asdict(heartbeat)))
        # Set the alarm if this rank found a reason and none is set, then read it. `get` might wait.
        self._alarm = self._ask(store.compare_set, "alarm", "", self._found).decode()
        ranks = range(world_size()) if is_main() or self._alarm else (0, rank())
        for number, heartbeat in self._read_heartbeats(store, list(ranks)).items():
            if number not in self._heard or self._heard[number][0] != heartbeat:
                self._heard[number] = (heartbeat, self._now)
        if self._record and self._step is not None and not has_left:
            silence = self._now - min(since for _, since in self._heard.values())
            self._record.write(self._step, silent_seconds=silence)

    def _read_heartbeats(self, store: Store, ranks: list[int]) -> dict[int, _Heartbeat]:
        # Ranks that have not written a heartbeat yet are left out.
        if not self._ask(store.check, [_key(number) for number in ranks]):
            ranks = [number for number in ranks if self._ask(store.check, [_key(number)])]
        texts = self._ask(store.multi_get, [_key(number) for number in ranks]) if ranks else []
        return {number: _Heartbeat(**json.loads(text)) for number, text in zip(ranks, texts, strict=True)}

    def _state(self) -> str:
        if self._end:
            return self._end
        phase = "starting" if self._step is None else f"in step {self._step + 1}"
        return f"{'evaluating or saving' if self._pauses else phase}, {_location(self._watched_thread)}"

    # --- The thread that watches the clock ---

    def _watch(self) -> None:
        progress, last, alarmed_at = self._progress, time.monotonic(), None
        try:
            while not self._stop.wait(_TICK_SECONDS):
                now = time.monotonic()
                self._now += min(now - last, 2 * _TICK_SECONDS)  # if more, this process was stopped
                last = now
                limit, _ = self._limit(self._step, self._pauses > 0)
                self._backstop.renew(limit + _BACKSTOP_TICKS * _TICK_SECONDS)
                if progress != self._progress or self._pauses or self._others_are_paused():
                    progress, self._progressed_at = self._progress, self._now
                if alarmed_at is None:
                    self._found = self._find_reason_to_end()
                    alarmed_at = self._now if self._alarm or self._found else None
                elif self._now - alarmed_at >= _ANSWER_TICKS * _TICK_SECONDS:
                    self._report_and_exit()
        except Exception:
            self._give_up()
        finally:
            self._backstop.close()

    def _limit(self, step: int | None, is_paused: bool) -> tuple[float, str]:
        # How long a rank may be without heartbeat or progress, as in (600.0, "600 s (init_timeout_seconds)").
        is_starting = step is None and not is_paused
        name = "init_timeout_seconds" if is_starting else "step_timeout_seconds"
        limit = self._init_timeout if is_starting else self._step_timeout
        return limit, f"{limit:g} s ({name})"

    def _others_are_paused(self) -> bool:
        return any(heard.is_paused for number, (heard, _) in self._heard.copy().items() if number != rank())

    def _find_reason_to_end(self) -> str:
        # Example: "no heartbeat from rank 3 for 600 s (step_timeout_seconds)".
        limit, limit_text = self._limit(self._step, self._pauses > 0)
        waited = 0.0 if self._waiting_since is None else self._now - self._waiting_since
        if waited > _SILENCE_TICKS * _TICK_SECONDS and agent_serves_store() and is_stopped(os.getppid()):
            self._warn_of_stopped_agent()
        elif waited > limit:
            advice = f". {restart_advice()}" if num_nodes() > 1 else ""
            cause = f"Rank 0 or its node has terminated or hangs{self._store_error}"
            return f"the key-value store on rank 0's node did not respond for {limit_text}. {cause}{advice}"
        for number in range(world_size()) if is_main() else (0,):
            heard, since = self._heard.get(number, (None, 0.0))
            silence, silence_text = self._limit(*((heard.step, heard.is_paused) if heard else (None, False)))
            # Measure up to the store's last answer: without the store, no heartbeat can be read.
            if self._answered_at - since > silence and not (heard and heard.has_left):
                return f"no heartbeat from rank {number} for {silence_text}"
        if self._now - self._progressed_at > limit:
            return f"no progress on rank {rank()} for {limit_text}"
        return ""

    def _warn_of_stopped_agent(self) -> None:
        if not self._agent_is_stopped and local_rank() == 0:
            log.warning(
                f"torchrun (process {os.getppid()}) is suspended (SIGSTOP), so it cannot restart this run. "
                f"Training continues. Run kill -CONT {os.getppid()} to continue torchrun."
            )
        self._agent_is_stopped = True
        self._waiting_since = self._now

    def _report_and_exit(self) -> None:
        # End the process even if printing blocks, for example on a full pipe that nobody reads.
        end = threading.Timer(_EXIT_TICKS * _TICK_SECONDS, os._exit, (EXIT_HANG,))
        end.start()
        # Start with "\n", because a progress bar may be on the line.
        line = (
            f"\nerror ({log.name_ranks([rank()])}): {self._alarm or self._found}. {self._describe_ranks()}\n"
        )
        log.leave_last_words(line)
        for file in filter(None, (sys.stderr, log.rank_file())):
            with contextlib.suppress(OSError, ValueError):  # a full disk, a closed file
                os.write(file.fileno(), line.encode())  # not file.write: a hung thread may hold its lock
                faulthandler.dump_traceback(file)
        if self._on_hang:
            with contextlib.suppress(Exception):
                self._on_hang()
        _write_flight_record()
        end.join()

    def _describe_ranks(self) -> str:
        # Small groups of ranks come before large ones, because the rank that differs is usually the cause.
        if self._now - self._answered_at >= _SILENCE_TICKS * _TICK_SECONDS:  # no recent heartbeats
            return f"{log.name_ranks([rank()])}: {self._state()}"
        groups: dict[tuple[bool, str], list[int]] = {}
        for number in range(world_size()):
            heard, since = self._heard.get(number, (None, 0.0))
            is_silent = not heard or (
                not heard.has_left and self._now - since >= _SILENCE_TICKS * _TICK_SECONDS
            )
            state = heard.state if heard else "no heartbeat received"
            if heard and is_silent:
                state = f"not responding, {state}"
            groups.setdefault((is_silent, state), []).append(number)
        ordered = sorted(groups.items(), key=lambda group: (not group[0][0], len(group[1])))
        described = [f"{log.name_ranks(numbers)}: {state}" for (_, state), numbers in ordered[:_MAX_GROUPS]]
        return "; ".join(described) + ("; ..." if len(ordered) > _MAX_GROUPS else "")


def _write_flight_record() -> None:
    # torch's tool `torchfrtrace` reads this record of the last collectives.
    folder = log.rank_folder()
    with contextlib.suppress(Exception):  # the disk may be full
        if folder is not None:
            (folder / f"flight_record_{rank()}").write_bytes(torch._C._distributed_c10d._dump_fr_trace())


def _key(number: int) -> str:
    return f"heartbeat/{number}"


def _location(thread: int) -> str:
    """Returns the line of this repository that a thread executes, such as "training/step.py:80 (train_step)".

    If the line is in the folder `distributed`, the line that called it comes first.

    thread: Identifier of the thread.
    """
    frame = sys._current_frames().get(thread)
    lines: list[str] = []
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_REPOSITORY) and "site-packages" not in path:
            path = path.removeprefix(_REPOSITORY)
            is_distributed = path.startswith("distributed" + os.sep)
            if not lines or not is_distributed:
                lines.insert(0, f"{path}:{frame.f_lineno} ({frame.f_code.co_name})")
            if not is_distributed:
                break
        frame = frame.f_back
    return " > ".join(lines) or "outside our code"

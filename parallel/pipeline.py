"""A circular pipeline: each rank has a part of every level's blocks, and slots of its own.

Of P ranks, rank k is stage k of every level and the home of its own slots. A call of a level sends the slots
of each home to stage 0, through all stages, and from the last one back home. Stage k works on the slots of
homes 0, 1, ..., P - 1 in turn, k turns behind stage 0, and its own come home in the very turn in which it has
served all. So the next call begins without a gap: the ring fills and drains once a step, however many calls a
recurrence makes. The backward pass is the same in reverse. Embedding, heads, loss, carry and halting stay at
home, as in data parallel, and do not know of it. docs/parallel.md has the share of time that ranks are idle.
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.collectives import Ranks

RunBlocks = Callable[[Tensor], Tensor]  # applies this stage's blocks to the slots of one home


class Level(Protocol):
    """What a pipeline needs of a level: who runs its blocks."""

    pipe: Callable[[Tensor, RunBlocks], Tensor] | None


class Ring:
    """The messages of a pipeline; all its ranks build theirs together, and make the same calls of levels.

    stages: its ranks, who send to the next stage. homes: the same ranks, in another group, for what leaves
    home and comes back: on NCCL messages of two ranks in one group wait for each other, so that the two kinds
    could wait for each other forever.
    """

    def __init__(self, stages: Ranks, homes: Ranks):
        self.stage, self.size, self._groups = stages.index, stages.size, (stages.group, homes.group)
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def send(self, tensor: Tensor, goal: int, *, home: bool) -> None:
        """Begins to send to another stage; `finish_sends` waits."""
        tensor = tensor.contiguous()
        self._sent.append((dist.isend(tensor, group_dst=goal, group=self._groups[home]), tensor))

    def receive(self, like: Tensor, source: int, *, home: bool) -> Callable[[], Tensor]:
        """Begins to receive from another stage a tensor like another one; returns what waits for it."""
        tensor = torch.empty_like(like, memory_format=torch.contiguous_format)
        work = dist.irecv(tensor, group_src=source, group=self._groups[home])

        def wait() -> Tensor:
            work.wait()
            return tensor

        return wait

    def finish_sends(self) -> None:
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()


def circulate(ring: Ring, own: Tensor, work: Callable[[int, Tensor], Tensor], *, forward: bool) -> Tensor:
    """Sends what each home has through all stages and back; returns what comes back to this one.

    work: what this stage makes of what the home with this number has sent. forward: from stage 0 to the last,
    else the other way round.
    """
    step, homes = (1, range(ring.size)) if forward else (-1, range(ring.size)[::-1])
    first, last, result = homes[0], homes[-1], None

    def receive(home: int) -> Callable[[], Tensor]:
        if ring.stage != first:
            return ring.receive(own, ring.stage - step, home=False)
        return (lambda: own) if home == first else ring.receive(own, home, home=True)

    if ring.stage != first:
        ring.send(own, first, home=True)
    waiting = receive(first)
    for home in homes:
        received = waiting()
        if home != last:
            waiting = receive(home + step)  # while this stage works
        made = work(home, received)
        if ring.stage != last:
            ring.send(made, ring.stage + step, home=False)
        elif home != last:
            ring.send(made, home, home=True)
        else:
            result = made
    if result is None:
        result = ring.receive(own, last, home=True)()
    ring.finish_sends()
    return result


class _Call(torch.autograd.Function):
    """A call of a level with gradient: each stage keeps its part of the graph of every home's slots."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, _anchor: Tensor, ring: Ring, run: RunBlocks) -> Tensor:
        ctx.ring, ctx.pieces = ring, {}

        def work(home: int, received: Tensor) -> Tensor:
            with torch.enable_grad():
                x = received.detach().requires_grad_()
                ctx.pieces[home] = x, run(x)
            return ctx.pieces[home][1].detach()

        return circulate(ring, h, work, forward=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        def work(home: int, received: Tensor) -> Tensor:
            x, y = ctx.pieces.pop(home)
            torch.autograd.backward(y, received)  # adds to the gradients of this stage's weights
            return x.grad

        return circulate(ctx.ring, gradient.contiguous(), work, forward=False), None, None, None


def call(ring: Ring, h: Tensor, run: RunBlocks) -> Tensor:
    """Calls a level with this rank's slots, [slots, ...], of one shape on all ranks, which all call it."""
    if not torch.is_grad_enabled():
        return circulate(ring, h, lambda _, received: run(received), forward=True)
    # Weights need a gradient even where the slots do not.
    return _Call.apply(h, h.new_zeros((), requires_grad=True), ring, run)


def pipe_levels(levels: Iterable[Level], ring: Ring) -> None:
    """Makes the ring run the blocks of each level, of which this rank has its stage's alone."""
    for level in levels:
        level.pipe = lambda h, run: call(ring, h, run)

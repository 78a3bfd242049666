"""A circular pipeline: each rank holds a part of every level's blocks, and has slots of its own.

A level is a stack of blocks that a network calls many times a step. Of P ranks, rank k runs stage k of every
level, and is the home of its slots. A call of a level sends the slots of every home to stage 0, through all
stages, and from the last stage back home. Stage k works on the slots of homes 0, 1, ..., P - 1 in turn, k
turns later than stage 0. The slots of home k come back just when stage k has finished with all homes, so that
the next call starts without a gap: the pipeline fills and drains once a step, not once a call. The backward
pass is the same in reverse. Embedding, heads, loss, carry and halting run at home, as in data parallelism.
docs/parallel.md has the share of time that ranks are idle.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed.collectives import Ranks


class Ring:
    """The messages among the ranks of a pipeline, which all build a `Ring` and call levels together.

    stages: these ranks, for messages from stage to stage. homes: a second group of the same ranks, for
    messages from and to home: in one group of NCCL, both kinds of messages between the same two ranks could
    wait for each other.
    """

    def __init__(self, stages: Ranks, homes: Ranks):
        self.stage, self.size, self._groups = stages.index, stages.size, (stages.group, homes.group)
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def send(self, tensor: Tensor, goal: int, *, home: bool) -> None:
        """Starts sending to rank `goal`; `finish_sends` waits. home: whether to use the group `homes`."""
        tensor = tensor.contiguous()
        self._sent.append((dist.isend(tensor, group_dst=goal, group=self._groups[home]), tensor))

    def receive(self, like: Tensor, source: int, *, home: bool) -> Callable[[], Tensor]:
        """Starts receiving a tensor like `like` from `source`; returns a function that waits for it.

        home: whether to use the group `homes`.
        """
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
    """Sends the tensor `own` of every home through all stages and back; returns the result of this home.

    All ranks of the ring call it. work: computes this stage's output from (number of a home, input). forward:
    False: through the stages in reverse, for gradients.
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
    """The autograd function of a level's call; each stage keeps a piece of the graph for each home.

    context: further arguments of the blocks; if these are tensors, their gradients are sums over all homes.
    """

    @staticmethod
    def forward(
        ctx: Any, ring: Ring, run: Callable[..., Tensor], _anchor: Tensor, h: Tensor, *context: Any
    ) -> Tensor:
        ctx.ring, ctx.pieces = ring, {}
        ctx.context = [
            each.detach().requires_grad_(each.requires_grad) if torch.is_tensor(each) else each
            for each in context
        ]

        def work(home: int, received: Tensor) -> Tensor:
            with torch.enable_grad():
                x = received.detach().requires_grad_()
                ctx.pieces[home] = x, run(x, *ctx.context)
            return ctx.pieces[home][1].detach()

        return circulate(ring, h, work, forward=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        def work(home: int, received: Tensor) -> Tensor:
            x, y = ctx.pieces.pop(home)
            torch.autograd.backward(y, received)  # adds to the gradients of this stage's weights
            return x.grad

        of_slots = circulate(ctx.ring, gradient.contiguous(), work, forward=False)
        return None, None, None, of_slots, *(getattr(each, "grad", None) for each in ctx.context)


def call(ring: Ring, run: Callable[..., Tensor], h: Tensor, *context: Any) -> Tensor:
    """Calls a level on this rank's slots, [slots, ...], of equal shape on all ranks; all ranks call it.

    context: further arguments of each block, equal on all ranks.
    """
    if not torch.is_grad_enabled():
        return circulate(ring, h, lambda _, received: run(received, *context), forward=True)
    # The extra input makes autograd call `backward`, for the weights, even where `h` needs no gradient.
    return _Call.apply(ring, run, h.new_zeros((), requires_grad=True), h, *context)


def keep_stage(level: Any, ranks: Ranks) -> None:
    """Drops all blocks of a level but those of this rank's stage; names of weights stay."""
    blocks = dict(level.layers.named_children())
    assert len(blocks) % ranks.size == 0, "the schema refuses other numbers"
    own = len(blocks) // ranks.size
    names = list(blocks)[ranks.index * own : (ranks.index + 1) * own]
    level.layers = nn.ModuleDict({name: blocks[name] for name in names})


def pipe_levels(levels: Iterable[Any], ring: Ring) -> None:
    """Makes calls of these levels go through the pipeline; this rank must hold only its stage's blocks.

    levels: with `run_blocks`, as `models.blocks.Level` has it.
    """
    for level in levels:
        level.run_blocks = functools.partial(call, ring, level.run_blocks)

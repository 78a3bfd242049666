"""Circular pipeline parallelism: each rank holds one stage of every level, and has slots of its own.

A level is a stack of blocks that a network calls many times in a training step. With P ranks, rank k holds
stage k of every level, and owns its slots. One call of a level sends the slots of every owner to stage 0,
then through all stages, and from the last stage back to the owner. In a turn, a stage processes the slots of
one owner. Stage 0 processes owner 0 in turn 0, owner 1 in turn 1, and so on. Stage k does the same, but
starts in turn k. The slots of owner k return exactly when stage k has processed the slots of all owners, so
rank k can start the next call without idle time. The pipeline therefore fills and drains, with idle ranks,
only once a training step, not once a call. The backward pass goes through the stages in reverse order. The
owner computes everything outside of levels: embedding, heads, loss, carry and halting. docs/parallel.md has
the fraction of idle time.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed.collectives import Ranks


class Ring:
    """Sends and receives tensors between the ranks of a pipeline.

    Each rank computes one stage of the pipeline, and owns a part of the batch. The data of an owner goes from
    the owner to the first stage, through all stages, and from the last stage back to the owner. All ranks of
    the pipeline create their `Ring` objects together.

    stages: Group of the ranks, for messages from one stage to the next.
    owners: Second group of the same ranks, for messages between an owner and the first or last stage. If both
        kinds of messages used one NCCL group, they could wait for each other.
    """

    def __init__(self, stages: Ranks, owners: Ranks):
        self.stage, self.size, self._groups = stages.index, stages.size, (stages.group, owners.group)
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def send(self, tensor: Tensor, destination: int, *, with_owner: bool) -> None:
        """Starts to send a tensor to rank `destination` of the pipeline, and does not wait.

        The tensor must not change before `finish_sends` returns.

        with_owner: Whether the tensor goes from its owner to a pipeline stage, or from a stage to its owner.
        If False, the tensor goes from one pipeline stage to the next (in a backward pass, to the previous).
        """
        tensor = tensor.contiguous()
        self._sent.append((dist.isend(tensor, group_dst=destination, group=self._groups[with_owner]), tensor))

    def receive(self, like: Tensor, source: int, *, with_owner: bool) -> Callable[[], Tensor]:
        """Starts to receive a tensor.

        Returns a function that waits for the tensor and returns it.

        like: Any tensor of the same shape and dtype. source: Rank of the pipeline that sends. with_owner:
        The value that the sender passes to `send`.
        """
        tensor = torch.empty_like(like, memory_format=torch.contiguous_format)
        work = dist.irecv(tensor, group_src=source, group=self._groups[with_owner])

        def wait() -> Tensor:
            work.wait()
            return tensor

        return wait

    def finish_sends(self) -> None:
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()


def circulate(ring: Ring, local: Tensor, work: Callable[[int, Tensor], Tensor], *, forward: bool) -> Tensor:
    """Sends the data of every rank through all pipeline stages and back to that rank.

    Returns the output for this rank's data. All ranks of the pipeline call it.

    local: Input of this rank, in the same shape on all ranks. work: Function that computes this rank's stage.
    work(r, x) gets the data x of rank r, and returns the output in the same shape. forward: Whether the
    stages run from first to last. If False, they run in reverse order, as in a backward pass.
    """
    step, owners = (1, range(ring.size)) if forward else (-1, range(ring.size)[::-1])
    first, last, result = owners[0], owners[-1], None

    def receive(owner: int) -> Callable[[], Tensor]:
        if ring.stage != first:
            return ring.receive(local, ring.stage - step, with_owner=False)
        return (lambda: local) if owner == first else ring.receive(local, owner, with_owner=True)

    if ring.stage != first:
        ring.send(local, first, with_owner=True)
    waiting = receive(first)
    for owner in owners:
        received = waiting()
        if owner != last:
            waiting = receive(owner + step)  # while this stage works
        made = work(owner, received)
        if ring.stage != last:
            ring.send(made, ring.stage + step, with_owner=False)
        elif owner != last:
            ring.send(made, owner, with_owner=True)
        else:
            result = made
    if result is None:
        result = ring.receive(local, last, with_owner=True)()
    ring.finish_sends()
    return result


class _Call(torch.autograd.Function):
    # If a tensor in `context` needs a gradient, its gradient is the sum over the data of all ranks.
    @staticmethod
    def forward(
        ctx: Any, ring: Ring, run: Callable[..., Tensor], _anchor: Tensor, h: Tensor, *context: Any
    ) -> Tensor:
        ctx.ring, ctx.pieces = ring, {}
        ctx.context = [
            value.detach().requires_grad_(value.requires_grad) if torch.is_tensor(value) else value
            for value in context
        ]

        def work(owner: int, received: Tensor) -> Tensor:
            with torch.enable_grad():
                x = received.detach().requires_grad_()
                ctx.pieces[owner] = x, run(x, *ctx.context)
            return ctx.pieces[owner][1].detach()

        return circulate(ring, h, work, forward=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        def work(owner: int, received: Tensor) -> Tensor:
            x, y = ctx.pieces.pop(owner)
            torch.autograd.backward(y, received)  # adds to the gradients of this stage's weights
            return x.grad

        of_slots = circulate(ctx.ring, gradient.contiguous(), work, forward=False)
        return None, None, None, of_slots, *(getattr(value, "grad", None) for value in ctx.context)


def call(ring: Ring, run: Callable[..., Tensor], h: Tensor, *context: Any) -> Tensor:
    """Runs a stack of blocks on this rank's data, through all pipeline stages.

    Returns the output of the last stage, [batch, ...]. All ranks of the pipeline call it with tensors of
    equal shape.

    run: Function run(h, *context) that runs the blocks of this rank's stage. h: Activations of this rank's
    slots, [batch, ...], the input of the first block. context: Further arguments that every block gets. They
    are equal on all ranks.
    """
    if not torch.is_grad_enabled():
        return circulate(ring, h, lambda _, received: run(received, *context), forward=True)
    # With the extra input, autograd calls `backward` (for the weights) even if `h` needs no gradient.
    return _Call.apply(ring, run, h.new_zeros((), requires_grad=True), h, *context)


def pipe_levels(levels: Mapping[str, Any], ring: Ring) -> None:
    """Changes stacks of blocks so that a call runs through all stages of a pipeline.

    Removes all blocks except those of this rank's stage. The remaining weights keep their names. Raises
    ValueError if the stages would have different numbers of blocks.

    levels: {name: stack of blocks} (class `Level`), changed in place. A stack has the blocks in the module
    `layers`, and a method `run_blocks` that calls them. ring: Connects the ranks of the pipeline.
    """
    for level_name, level in levels.items():
        blocks = dict(level.layers.named_children())
        if len(blocks) % ring.size:  # the schema knows only the keys of our models
            raise ValueError(
                f"pipeline_parallel_degree={ring.size} does not divide the {len(blocks)} blocks of "
                f"{level_name}. Set a divisor of {len(blocks)}."
            )
        num_local = len(blocks) // ring.size
        names = list(blocks)[ring.stage * num_local : (ring.stage + 1) * num_local]
        level.layers = nn.ModuleDict({name: blocks[name] for name in names})
        level.run_blocks = functools.partial(call, ring, level.run_blocks)

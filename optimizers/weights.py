"""The dense weights of a run: flat buffers, the part that this rank updates, and the optimizers."""

import importlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from config.schema import PretrainConfig, find_optimizer
from distributed.collectives import ALONE, Ranks
from distributed.flat import FlatParameters
from distributed.mesh import Mesh
from distributed.scalars import Scalars
from distributed.shards import Shard, Span, Tensors, part_of_whole, shard_of_own, tensor_of
from distributed.tensor import Cut
from optimizers.rules.adam_atan2 import AdamATan2
from optimizers.rules.muon import Muon

# Numbers of each rank that are sent with the gradients, or with the changes of weights: sum of losses,
# gradient norm (only with local steps), stop request (0 or 1).
SCALARS = ("loss", "grad_norm", "stop")


class ParameterGroup(NamedTuple):
    """An optimizer, and the names of the weights that it updates."""

    names: tuple[str, ...]  # they have the same weight decay
    optimizer: torch.optim.Optimizer
    flat: FlatParameters  # contains the weights `names`, and perhaps others


class Weights:
    """The weights of a model, except puzzle embeddings, with their optimizers.

    Attributes:
        flats: Objects that each store the values of many weights in one tensor, and the gradients of these
            weights in another. Usually there is one object. With pipeline or tensor parallelism, there are
            two: one for the weights outside of transformer blocks, and one for this rank's part of the
            blocks.
        groups: Pairs of an optimizer and the names of the weights that it updates (`ParameterGroup`).
        owned: Weights that this rank updates, {name: tensor or shard}. A value is a full tensor or, if this
            rank updates only a part of the weight, a shard. With pipeline or tensor parallelism, all weights
            of blocks are shards.
        scalars: Numbers that are sent together with the gradients, such as the loss.
        absent: Names of the weights that only other pipeline stages hold.

    Args:
        shapes: {name: shape} of all weights of the model.
        holders: Group of the ranks that share one copy of the model (pipeline and tensor parallelism), with
            this rank. Together, they hold every element of the transformer blocks once.
        trains_alone: Whether each rank has an optimizer state of its own, as with local_steps > 1.
    """

    def __init__(
        self,
        flats: tuple[FlatParameters, ...],
        groups: tuple[ParameterGroup, ...],
        *,
        shapes: dict[str, tuple[int, ...]],
        holders: Ranks = ALONE,
        trains_alone: bool = False,
    ):
        self.flats, self.groups, self._holders, self._trains_alone = flats, groups, holders, trains_alone
        self.owned: Tensors = {name: part for flat in flats for name, part in flat.owned.items()}
        self.scalars: Scalars = flats[0].scalars
        self.num_parameters = sum(map(math.prod, shapes.values()))
        nothing = flats[0].message[:0]
        self._absent_shards = {
            name: Shard(nothing, (), shape) for name, shape in shapes.items() if name not in self.owned
        }
        self.absent = tuple(self._absent_shards)

    def clip_(self, limit: float | None) -> Tensor:
        """Scales the gradients so that their norm is at most `limit`. All ranks call it.

        Returns the norm before scaling, a scalar tensor. With pipeline or tensor parallelism, the norm
        includes the gradients of the weights that only other ranks hold.

        limit: Maximum norm. If None, the gradients do not change.
        """
        norms = [torch.linalg.vector_norm(flat.gradients) for flat in self.flats]
        norm = norms[0]
        if len(norms) > 1:
            rest, blocks = (part_norm.double().square() for part_norm in norms)
            norm = (rest + self._holders.all_reduce_sum_(blocks)).sqrt().to(norm.dtype)
        if limit is not None:
            for flat in self.flats:
                flat.gradients.mul_((limit / norm).clamp(max=1.0))
        return norm

    def update_(self, lr: float, *, step: int) -> None:
        """Runs the optimizers on the weights that this rank updates, in training step `step` (from 1).

        All ranks call it.
        """
        for group in self.groups:
            for settings in group.optimizer.param_groups:  # several only in a plugin
                settings.update(lr=lr, step=step - 1)  # AdamATan2 adds 1 to `step` before it uses it
            group.optimizer.step()

    def gather_(self) -> None:
        """Sends updated or loaded weights to all ranks that need them in the forward pass. All ranks call it.

        In mixed precision, the float32 weights are first cast to the dtype of the forward pass.
        """
        for flat in self.flats:
            flat.gather_()

    def tensors(self) -> Tensors:
        """Returns the weights for a checkpoint, as {name: tensor or shard}.

        The result contains all weights of the model, except puzzle embeddings, in the dtype of the optimizer
        (float32). A shard is the part of a weight that this rank updates. If this rank updates no part of the
        weight, the shard has 0 elements.
        """
        tensors = self.owned | self._absent_shards
        for flat in self.flats:
            if not flat.is_mixed and not flat.is_part:
                tensors |= flat.parameters  # every rank has the full weights
        return tensors

    def moments(self) -> Tensors:
        """Returns the optimizer state for a checkpoint, as {name: tensor or shard}.

        A name joins the name of a state tensor and the name of its weight. Example:
        "first_moment.lm_head.weight". The result contains only the state of the weights that this rank
        updates.
        """
        moments: Tensors = {}
        for group in self.groups:
            for name in group.names:
                part = self.owned[name]
                for moment, tensor in group.optimizer.state.get(tensor_of(part), {}).items():
                    if isinstance(part, Shard) and tensor.ndim:
                        tensor = part._replace(tensor=tensor)
                    elif group.flat.is_part:  # a step count is equal on all ranks with a part of the weight
                        cut = group.flat.cuts.get(name)
                        is_copy = group.flat.ranks.index > 0 or (cut is not None and cut.begin > 0)
                        tensor = Shard(tensor, (Span(0, 1),), (), is_copy=is_copy)
                    moments[f"{moment}.{name}"] = tensor
        if self._trains_alone:
            return {name: shard_of_own(tensor, self.flats[0].ranks) for name, tensor in moments.items()}
        return moments

    def fill_(self, full_copies: dict[str, Tensor], ranks: Ranks) -> None:
        """Overwrites those weights that ranks divide into shards. The new values are `full_copies` of rank 0.

        All ranks of `ranks` call it. Weights that are not divided into shards do not change.

        full_copies: On rank 0, {name: full weight}. On other ranks, {}. ranks: Group of all ranks of the run.
        """
        for name, shard in sorted(self.tensors().items()):
            if isinstance(shard, Shard):
                full = self.flats[0].message.new_empty(shard.shape)
                if name in full_copies:
                    full.copy_(full_copies[name])  # a checkpoint may have another dtype, on the CPU
                ranks.broadcast_([full])
                shard.tensor.copy_(part_of_whole(full, shard).view_as(shard.tensor))


def build_flats(
    config: PretrainConfig,
    network: nn.Module,
    mesh: Mesh,
    *,
    blocks: frozenset[str],
    cuts: dict[str, Cut],
) -> tuple[FlatParameters, ...]:
    """Moves the weights of a network into a few large tensors. All ranks call it.

    Returns one object for all weights. With pipeline or tensor parallelism, returns two: one for the weights
    outside of transformer blocks, and one for the weights of blocks on this rank.

    mesh: Process groups of this rank. blocks: Names of the weights in transformer blocks. cuts: {name: part
    of the weight that this rank holds}, for each weight that tensor-parallel ranks divide. Otherwise {}.
    """
    parameters = dict(network.named_parameters())
    matrices = [name for name in blocks if parameters[name].ndim == 2]
    of_blocks = {
        "shard_group": mesh.shard_group,
        "unsplit": matrices if config.optimizer == "muon" else (),
        # DistributedDataParallel needs gradients in the dtype of the parameters.
        "cast": blocks if network.dtype != torch.float32 and config.sync != "ddp" else (),
        "compute_dtype": network.dtype,
        "undecayed": network.undecayed,
    }
    if not mesh.is_plain:
        rest = [item for item in parameters.items() if item[0] not in blocks]
        here = [item for item in parameters.items() if item[0] in blocks]
        return (
            FlatParameters(rest, SCALARS, ranks=mesh.data, undecayed=network.undecayed),
            FlatParameters(here, ranks=mesh.replicas, is_part=True, cuts=cuts, **of_blocks),
        )
    # Shared memory supports only sums in every step, of all weights, in float32.
    sends_less = config.sync_dtype != "float32" or config.local_steps > 1 or config.train_only != "all"
    on_cpu = all(parameter.device.type == "cpu" for parameter in parameters.values())
    in_shared_memory = config.sync == "auto" and on_cpu and not sends_less
    in_shared_memory &= mesh.shard_group.size in (1, mesh.data.size)
    if config.data_parallel_shard_degree == "auto":
        of_blocks["shard_group"] = None
    options = {"in_shared_memory": in_shared_memory, **of_blocks}
    return (FlatParameters(parameters.items(), SCALARS, ranks=mesh.data, **options),)


def build_weights(
    config: PretrainConfig,
    *flats: FlatParameters,
    shapes: dict[str, tuple[int, ...]] | None = None,
    holders: Ranks = ALONE,
    tensor: Ranks = ALONE,
    trains_alone: bool = False,
    compiler_options: dict[str, Any] | None = None,
) -> Weights:
    """Creates the optimizers for the weights that this rank updates.

    Optimizers must create all of their `state` in the constructor, because a checkpoint is loaded into these
    tensors. An optimizer from a plugin (a Python file of the user) may get shards of weights, float32 [n], so
    it must update each element independently.

    Args:
        flats: Objects that each store the values of many weights in one tensor, from `build_flats`.
        shapes: {name: shape} of all weights of the model. If None, all weights are in `flats`.
        holders: Group of the ranks that share one copy of the model (pipeline and tensor parallelism), with
            this rank. Together, they hold every element of the transformer blocks once. `Weights.clip_` sums
            over this group to get the gradient norm. By default, only this rank.
        tensor: Group of the ranks that divide each matrix (tensor parallelism), with this rank. By default,
            only this rank.
        trains_alone: Whether each rank has an optimizer state of its own, as with local_steps > 1.
        compiler_options: Options of torch.compile for AdamATan2. If None, it is not compiled.
    """
    groups = [group for flat in flats for group in _groups_of(config, flat, tensor, compiler_options)]
    here = {name: tuple(parameter.shape) for flat in flats for name, parameter in flat.parameters.items()}
    return Weights(flats, tuple(groups), shapes=shapes or here, holders=holders, trains_alone=trains_alone)


def state_numbers_per_weight(config: PretrainConfig) -> float:
    """Returns how many numbers the optimizer stores for each weight. Example: 2 for AdamW.

    With optimizer=muon, this is the number for weights that are not matrices of the blocks.
    """
    weight = nn.Parameter(torch.zeros(16))
    moments = build_weights(config, FlatParameters([("weight", weight)], SCALARS, ranks=ALONE)).moments()
    return sum(tensor_of(moment).numel() for moment in moments.values() if tensor_of(moment).ndim) / 16


def _check_state(
    of_plugin: type[torch.optim.Optimizer], options: dict[str, Any], device: torch.device
) -> None:
    """Raises ValueError if a checkpoint cannot be read into the state of an optimizer of a plugin.

    device: Device of the weights, because the step of an optimizer may need a GPU.
    """
    weight = nn.Parameter(torch.zeros(16, device=device))
    weight.grad = torch.zeros_like(weight)
    optimizer = of_plugin([weight], **options)
    created = set(optimizer.state[weight])
    for settings in optimizer.param_groups:
        settings.update(step=0)  # as `Weights.update_` does
    optimizer.step()
    for name, value in optimizer.state[weight].items():
        is_tensor = isinstance(value, Tensor) and value.shape in ((), weight.shape)
        if name not in created or not is_tensor:
            raise ValueError(
                f"optimizer={of_plugin.name}: a checkpoint cannot be read into its state {name!r}. The "
                "constructor must create a scalar tensor or a tensor of the parameter's shape "
                "(docs/extend.md)."
            )


def _groups_of(
    config: PretrainConfig, flat: FlatParameters, tensor: Ranks, compiler_options: dict[str, Any] | None
) -> Iterator[ParameterGroup]:
    for weight_decay, is_undecayed in ((config.weight_decay, False), (0.0, True)):
        names = [name for name in flat.parameters if (name in flat.undecayed) == is_undecayed]
        names = tuple(name for name in names if name not in flat.unsplit)
        adam = {"lr": config.lr, "beta1": config.beta1, "beta2": config.beta2, "weight_decay": weight_decay}
        if not names:
            continue
        parts = [tensor_of(flat.owned[name]) for name in names]
        if (of_plugin := find_optimizer(config.optimizer)) is not None:
            options = {"lr": config.lr, "weight_decay": weight_decay, **(config.optimizer_options or {})}
            _check_state(of_plugin, options, parts[0].device)
            optimizer = of_plugin(parts, **options)
        elif config.optimizer in ("adam_atan2", "muon"):
            optimizer = AdamATan2(flat, names, compiler_options=compiler_options, **adam)
        else:
            optimizer = importlib.import_module(f"optimizers.rules.{config.optimizer}").OPTIMIZER(
                parts, **adam
            )
        yield ParameterGroup(names, optimizer, flat)
    if matrices := tuple(name for name in flat.parameters if name in flat.unsplit):
        parts = {name: tensor_of(flat.owned[name]) for name in matrices}
        options = {"lr": config.lr, "weight_decay": config.weight_decay}
        options["dtype"] = getattr(torch, config.arch.forward_dtype)
        yield ParameterGroup(matrices, Muon(parts, flat.cuts, tensor, **options), flat)

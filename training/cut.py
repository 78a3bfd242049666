"""Reduces a model to the part that this rank holds: its pipeline stage, and its shard of the weights."""

from torch import nn

from distributed.mesh import Mesh
from distributed.pipeline import keep_stage
from distributed.tensor import Cut, Plan, cut_tensors
from models.blocks import levels_of
from models.layers import Attention, Convolution, SwiGLU
from models.network import Network
from models.urm import ConvSwiGLU


def plan_of(layer: nn.Module) -> Plan | None:
    """Returns how tensor parallelism divides the weights of a layer among ranks.

    Returns None if it does not divide them. Otherwise each rank computes the layer with its part of the
    weights, and the outputs are summed over ranks.
    """
    if isinstance(layer, Attention):  # by heads
        width, inner = layer.o_proj.weight.shape
        num_heads = inner // layer.head_dim
        return Plan({"qkv_proj.weight": (3, num_heads), "o_proj.weight": (width, num_heads)})
    if isinstance(layer, Convolution):  # by features of the input
        return Plan({"weight": (len(layer.weight), len(layer.weight))}, reads_share=True)
    if isinstance(layer, SwiGLU | ConvSwiGLU):  # by inner features
        width, inner = layer.down_proj.weight.shape
        weights = {"gate_up_proj.weight": (2, inner), "down_proj.weight": (width, inner)}
        if isinstance(layer, ConvSwiGLU):
            weights |= {"dwconv.weight": (1, inner), "dwconv.bias": (1, inner)}
        return Plan(weights)
    return None


def cut(network: Network, mesh: Mesh) -> dict[str, Cut]:
    """Reduces a network in place to the part that this rank holds.

    Removes the blocks of other pipeline stages, and divides weights among tensor-parallel ranks. The weights
    must be initialized before.

    Returns {name of a divided weight: which part of it this rank holds}. {} without tensor parallelism.

    mesh: Process groups of this rank for pipeline and tensor parallelism.
    """
    if mesh.pipeline.size > 1:
        for level in levels_of(network).values():
            keep_stage(level, mesh.pipeline)
    return cut_tensors(network, mesh.tensor, plan_of) if mesh.tensor.size > 1 else {}

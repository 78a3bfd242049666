"""How tensor parallelism divides each kind of layer."""

from torch import nn

from distributed.tensor import Plan
from models.layers import Attention, Convolution, SwiGLU
from models.urm import ConvSwiGLU


def plan_of(layer: nn.Module) -> Plan | None:
    """Returns how tensor parallelism divides the weights of a layer among ranks.

    Returns None if every rank holds all weights of the layer. Otherwise each rank computes the layer with its
    part of the weights, and the outputs are summed over ranks.
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

"""The papers' baseline: a plain transformer of the same blocks, which answers in one pass."""

from typing import Protocol

from torch import Tensor

from models.network import Architecture, Network, State


class TransformerArchitecture(Architecture, Protocol):
    """What the transformer reads of its config beside the rest."""

    num_layers: int


class Transformer(Network):
    """Its answer is read from z_H; it starts anew each time, so that nothing kept between steps matters."""

    def __init__(self, arch: TransformerArchitecture, **facts: int):
        super().__init__(arch, levels={"blocks": arch.num_layers}, **facts)

    def reason(self, state: State, e: Tensor, rotary: tuple[Tensor, Tensor] | None) -> State:
        return State(self.blocks(e, 0, rotary), state.z_L)

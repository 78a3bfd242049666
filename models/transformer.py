"""The baseline of the papers: a plain transformer of the same blocks, which answers in one pass."""

from typing import Any

from torch import Tensor

from config.architecture import TransformerConfig
from dataset.format import Metadata
from models.blocks import Level
from models.carry import Reasoning, State
from models.random import Draws
from models.tokens import TokenNetwork


class Transformer(TokenNetwork):
    """The baseline network: a stack of blocks, without a state. H_init and L_init exist, but are not used."""

    def __init__(self, arch: TransformerConfig, metadata: Metadata, **options: Any):
        super().__init__(arch, metadata, levels={"blocks": arch.num_layers}, **options)

    def initial_state(self, batch_size: int, *, seq_len: int) -> State:
        return {}

    def reason(self, state: State, e: Tensor, reasoning: Reasoning, draws: Draws | None) -> State:
        return {"z_H": self.blocks(e, 0, self.rotary)}

    def calls(self, reasoning: Reasoning) -> list[tuple[Level, int, int]]:
        return [(self.blocks, 1, 1)]


NETWORK = Transformer

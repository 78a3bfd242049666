"""The baseline of the papers: a transformer of the same blocks that answers in one forward pass.

A slot halts after its first thinking step. The puzzle embedding is a learned vector for each puzzle
identifier, in position 0, before the cells. The loss is the same as in TRM: the stablemax cross-entropy of
the answer, plus 0.5 times the binary cross-entropy of q_halt (models/objective.py).
"""

from torch import Tensor

from config.architecture import TransformerConfig
from dataset.metadata import Metadata
from models.blocks import Level, build_block
from models.carry import Prediction, Reasoning, State
from models.layers import Linear, truncated_normal
from models.network import TokenNetwork, build_q_head
from models.random import SlotRng


class Transformer(TokenNetwork):
    """A transformer that answers in one forward pass, without a hidden state between calls.

    The network is a stack of `num_layers` blocks, followed by the output layers. Its checkpoints contain the
    buffers H_init and L_init, which have no effect.
    """

    def __init__(self, arch: TransformerConfig, metadata: Metadata):
        super().__init__(arch, metadata)  # builds embed_tokens, puzzle_emb, embed_pos and rotary
        self.register_buffer("H_init", truncated_normal(arch.hidden_size, std=1).to(self.dtype))
        self.register_buffer("L_init", truncated_normal(arch.hidden_size, std=1).to(self.dtype))
        # The order of creation (heads, level) fixes the initial weights. See models/trm.py.
        lm_head, q_head = Linear(arch.hidden_size, metadata.vocab_size), build_q_head(arch.hidden_size)
        self.blocks = Level(build_block(arch, metadata) for _ in range(arch.num_layers))
        self.lm_head, self.q_head = lm_head, q_head

    def forward(
        self,
        state: State,
        inputs: Tensor,
        puzzle_identifiers: Tensor,
        *,
        reasoning: Reasoning,
        rng: SlotRng | None = None,
    ) -> tuple[State, Prediction]:
        e = self.embed(inputs, puzzle_identifiers)
        return {}, self.answer(self.blocks(e, 0, self.rotary))


NETWORK = Transformer

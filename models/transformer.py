"""The baseline of the papers: a plain transformer of the same blocks, which answers in one pass."""

from torch import Tensor

from config.architecture import TransformerConfig
from dataset.format import Metadata
from models.blocks import Level, build_block
from models.carry import Prediction, Reasoning, State
from models.embedding import build_positions, build_puzzle_table, embed_puzzle
from models.layers import Embedding, Linear, truncated_normal
from models.network import Network
from models.q_head import QHead, QLearning
from models.random import Draws


class Transformer(Network):
    """The baseline network: a stack of blocks, without a state. H_init and L_init exist, but are not used."""

    objective_class = QLearning

    def __init__(self, arch: TransformerConfig, metadata: Metadata):
        super().__init__(arch)
        width = arch.hidden_size

        # Weights are drawn in an order that recorded results depend on, and registered in the order of use.
        self.embed_tokens = Embedding(metadata.vocab_size, width, std=width**-0.5, dtype=self.dtype)
        self.puzzle_emb = build_puzzle_table(arch, metadata, width=arch.puzzle_emb_ndim)
        self.embed_pos, rotary = build_positions(arch, metadata, dtype=self.dtype)
        self.register_buffer("rotary", rotary, persistent=False)
        self.register_buffer("H_init", truncated_normal(width, std=1).to(self.dtype))
        self.register_buffer("L_init", truncated_normal(width, std=1).to(self.dtype))
        lm_head, q_head = Linear(width, metadata.vocab_size), QHead(width, reads_mean=arch.conv == "instead")
        self.blocks = Level(build_block(arch, metadata) for _ in range(arch.num_layers))
        self.lm_head, self.q_head = lm_head, q_head

    def forward(
        self,
        state: State,
        inputs: Tensor,
        puzzle_identifiers: Tensor,
        *,
        reasoning: Reasoning,
        draws: Draws | None = None,
    ) -> tuple[State, Prediction]:
        e = embed_puzzle(
            inputs,
            puzzle_identifiers,
            tokens=self.embed_tokens,
            puzzles=self.puzzle_emb,
            positions=self.embed_pos,
            num_puzzle_positions=self.arch.num_puzzle_positions,
        )
        h = self.blocks(e, 0, self.rotary)
        logits, q = self.lm_head(h)[:, self.arch.num_puzzle_positions :], self.q_head(h)
        return {}, Prediction(logits, q[:, 0], q[:, 1])


NETWORK = Transformer

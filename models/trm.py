"""The Tiny Recursive Model (TRM, arXiv 2510.04871): one small level updates both z_L and z_H."""

from torch import Tensor

from config.architecture import TRMConfig
from dataset.format import Metadata
from models.blocks import Level, build_block
from models.carry import Prediction, Reasoning, State
from models.layers import Linear, truncated_normal
from models.network import TokenNetwork, build_q_head, gradient_if
from models.noise import perturbed
from models.random import SlotRng


class TRM(TokenNetwork):
    """The network of TRM. A slot keeps two states between thinking steps, z_H and z_L (y and z in the paper).

    A thinking step, with the embedded puzzle e and the level L, a stack of `L_layers` blocks:

        H_cycles times:
            L_cycles times:  z_L = L(z_L + z_H + e)
            once:            z_H = L(z_H + z_L)
        logits = lm_head(z_H at the cells)
        q_halt, q_continue = q_head(z_H at position 0)

    By default (config/arch/trm.yaml), a thinking step has 3 H cycles of 6 + 1 calls of a level of 2 blocks.
    e, z_H and z_L are [batch, positions, hidden] in the forward dtype. The positions are those of the puzzle
    embedding (`arch.puzzle_emb_len`, by default 16), then the cells (seq_len).

    Only the calls in the last `gradient_cycles` H cycles (by default 1) have gradient. If it is 0,
    only the last call for z_L and the last call for z_H do (the one-step gradient of HRM). The new state is
    detached, so no gradient flows into the thinking step before.

    When a slot halts: models/halting.py. The loss: models/objective.py. The table of puzzle embeddings:
    models/puzzle_embedding.py.
    """

    def __init__(self, arch: TRMConfig, metadata: Metadata):
        super().__init__(arch, metadata)  # builds embed_tokens, puzzle_emb, embed_pos and rotary
        # The state of a slot that starts: random vectors, equal at all positions, never trained.
        self.register_buffer("H_init", truncated_normal(arch.hidden_size, std=1).to(self.dtype))
        self.register_buffer("L_init", truncated_normal(arch.hidden_size, std=1).to(self.dtype))
        # Create the heads before the level, because recorded results depend on this order of random numbers.
        # Assign them after the level, because modules are registered in the order of use.
        lm_head, q_head = Linear(arch.hidden_size, metadata.vocab_size), build_q_head(arch.hidden_size)
        self.L_level = Level(build_block(arch, metadata) for _ in range(arch.L_layers))
        self.lm_head, self.q_head = lm_head, q_head

    def initial_state(self, batch_size: int, *, seq_len: int) -> State:
        shape = batch_size, self.num_puzzle_positions + seq_len, self.arch.hidden_size
        return {"z_H": self.H_init.expand(shape), "z_L": self.L_init.expand(shape)}

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
        # L(z, x) returns blocks(z + x, rotary). The formulas above write it as L(z + x). Damping and noise
        # (models/noise.py) are off by default.
        L = perturbed(self.L_level, reasoning, rng, self.rotary)
        z_H, z_L = state["z_H"], state["z_L"]
        first_with_gradient = reasoning.H_cycles - self.arch.gradient_cycles  # the first such H cycle
        for cycle in range(reasoning.H_cycles):
            has_gradient, is_last = cycle >= first_with_gradient, cycle == reasoning.H_cycles - 1
            # All calls for z_L in a cycle read the same x. It is computed with gradient, so that e gets a
            # gradient from the calls that have one.
            x = z_H + e
            for call in range(reasoning.L_cycles):
                # The part with `is_last` matters only if gradient_cycles is 0.
                with gradient_if(has_gradient or (is_last and call == reasoning.L_cycles - 1)):
                    z_L = L(z_L, x)
            with gradient_if(has_gradient or is_last):
                z_H = L(z_H, z_L)
        return {"z_H": z_H.detach(), "z_L": z_L.detach()}, self.answer(z_H)


NETWORK = TRM

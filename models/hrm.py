"""The Hierarchical Reasoning Model (HRM, arXiv 2506.21734): a slow and a fast level, called in turns."""

from torch import Tensor

from config.architecture import HRMConfig
from dataset.format import Metadata
from models.blocks import Level, build_block
from models.carry import Prediction, Reasoning, State
from models.layers import Linear, truncated_normal
from models.network import TokenNetwork, build_q_head, gradient_if
from models.noise import perturbed
from models.random import SlotRng


class HRM(TokenNetwork):
    """The network of HRM. A slot keeps two states between thinking steps, the slow z_H and the fast z_L.

    A thinking step, with the embedded puzzle e and two levels, L of `L_layers` and H of `H_layers` blocks:

        H_cycles times:
            L_cycles times:  z_L = L(z_L + z_H + e)
            once:            z_H = H(z_H + z_L)
        logits = lm_head(z_H at the cells)
        q_halt, q_continue = q_head(z_H at position 0)

    By default (config/arch/hrm.yaml), a thinking step has 2 H cycles of 2 + 1 calls of levels of 4 blocks.
    e, z_H and z_L are [batch, positions, hidden] in the forward dtype: the positions of the puzzle embedding
    (by default 1), then the cells (seq_len).

    If gradient_cycles is 0, its default, only the last call of L and the last call of H have gradient
    (section 2 of the paper). Otherwise all calls in the last `gradient_cycles` H cycles do. The new state is
    detached, so no gradient flows into the thinking step before.
    """

    def __init__(self, arch: HRMConfig, metadata: Metadata):
        super().__init__(arch, metadata)  # builds embed_tokens, puzzle_emb, embed_pos and rotary
        # The state of a slot that starts: random vectors, equal at all positions, never trained.
        self.register_buffer("H_init", truncated_normal(arch.hidden_size, std=1).to(self.dtype))
        self.register_buffer("L_init", truncated_normal(arch.hidden_size, std=1).to(self.dtype))
        # Create the heads before the level, because recorded results depend on this order of random numbers.
        # Assign them after the level, because modules are registered in the order of use.
        lm_head, q_head = Linear(arch.hidden_size, metadata.vocab_size), build_q_head(arch.hidden_size)
        H_level = Level(build_block(arch, metadata) for _ in range(arch.H_layers))
        self.L_level = Level(build_block(arch, metadata) for _ in range(arch.L_layers))
        self.H_level, self.lm_head, self.q_head = H_level, lm_head, q_head

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
        H = perturbed(self.H_level, reasoning, rng, self.rotary, name="H")
        L = perturbed(self.L_level, reasoning, rng, self.rotary, name="L")
        z_H, z_L = state["z_H"], state["z_L"]
        first_with_gradient = reasoning.H_cycles - self.arch.gradient_cycles  # the first such H cycle
        for cycle in range(reasoning.H_cycles):
            has_gradient, is_last = cycle >= first_with_gradient, cycle == reasoning.H_cycles - 1
            x = z_H + e  # once per cycle: all calls for z_L read the same sum
            for call in range(reasoning.L_cycles):
                with gradient_if(has_gradient or (is_last and call == reasoning.L_cycles - 1)):
                    z_L = L(z_L, x)
            with gradient_if(has_gradient or is_last):
                z_H = H(z_H, z_L)
        return {"z_H": z_H.detach(), "z_L": z_L.detach()}, self.answer(z_H)


NETWORK = HRM

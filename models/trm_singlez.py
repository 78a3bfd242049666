"""TRM with one state in place of z_H and z_L (table 2 of the paper, arXiv 2510.04871).

models/trm.py explains all other parts: gradient, puzzle embedding, halting and loss.
"""

from torch import Tensor

from config.architecture import TRMSingleZConfig
from dataset.metadata import Metadata
from models.blocks import Level, build_block
from models.carry import Prediction, Reasoning, State
from models.layers import Linear, truncated_normal
from models.network import TokenNetwork, build_q_head, gradient_if
from models.noise import perturbed
from models.random import SlotRng


class TRMSingleZ(TokenNetwork):
    """The network of TRM (arXiv 2510.04871) with one hidden state z_H instead of two.

    One call of the network, with the embedded puzzle e and a stack L of `L_layers` transformer blocks:

        H_cycles times:
            L_cycles times:  z_H = L(z_H + e)
            once:            z_H = L(z_H)
        logits = lm_head(z_H at the cells)
        q_halt, q_continue = q_head(z_H at position 0; with arch.conv=instead, the mean over positions)

    q_halt decides when a puzzle halts. q_continue has no effect by default. e and z_H are [batch, positions,
    hidden]: positions for the puzzle embedding, then the cells. All calls of L in the last `gradient_cycles`
    H cycles have gradient (by default in the last one). If gradient_cycles is 0, only the last call that adds
    e, and the last call of all, have gradient.
    """

    def __init__(self, arch: TRMSingleZConfig, metadata: Metadata):
        super().__init__(arch, metadata)  # builds embed_tokens, puzzle_emb, embed_pos and rotary
        # The state of a slot that starts: a random vector, equal at all positions, never trained.
        self.register_buffer("H_init", truncated_normal(arch.hidden_size, std=1).to(self.dtype))
        # The order of creation (heads, level) fixes the initial weights. See models/trm.py.
        lm_head, q_head = Linear(arch.hidden_size, metadata.vocab_size), build_q_head(arch.hidden_size)
        self.L_level = Level(build_block(arch, metadata) for _ in range(arch.L_layers))
        self.lm_head, self.q_head = lm_head, q_head

    def initial_state(self, batch_size: int, *, seq_len: int) -> State:
        shape = batch_size, self.num_puzzle_positions + seq_len, self.arch.hidden_size
        return {"z_H": self.H_init.expand(shape)}

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
        # L(z, x) is blocks(z + x). `perturbed` adds damping and noise (models/noise.py), by default none.
        L = perturbed(self.L_level, reasoning, rng, self.rotary)
        z_H = state["z_H"]
        # The first H cycle in which all calls have gradient. With gradient_cycles=0, there is no such cycle.
        first_with_gradient = reasoning.H_cycles - self.arch.gradient_cycles
        for cycle in range(reasoning.H_cycles):
            has_gradient, is_last_cycle = cycle >= first_with_gradient, cycle == reasoning.H_cycles - 1
            for call in range(reasoning.L_cycles):
                is_last_call = is_last_cycle and call == reasoning.L_cycles - 1
                with gradient_if(has_gradient or is_last_call):
                    z_H = L(z_H, e)
            with gradient_if(has_gradient or is_last_cycle):
                z_H = L(z_H, 0)
        return {"z_H": z_H.detach()}, self.answer(z_H)


NETWORK = TRMSingleZ

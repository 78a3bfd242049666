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

    A thinking step, with the embedded puzzle e and two levels H and L, stacks of blocks:

        H_cycles times:
            L_cycles times:  z_L = L(z_L + z_H + e)
            once:            z_H = H(z_H + z_L)
        logits = lm_head(z_H at the cells)
        q_halt, q_continue = q_head(z_H at position 0)

    e, z_H and z_L are [batch, positions, hidden] in the forward dtype: the puzzle positions, then the cells.

    With gradient_cycles=0, only the last call of L and the last call of H carry gradient (section 2 of the
    paper). Otherwise all calls in the last `gradient_cycles` H cycles do. The new state is detached.
    """

    def __init__(self, arch: HRMConfig, metadata: Metadata):
        super().__init__(arch, metadata)  # builds embed_tokens, puzzle_emb, embed_pos and rotary
        # The state of a slot that starts: random vectors, equal at all positions, never trained.
        self.register_buffer("H_init", truncated_normal(arch.hidden_size, std=1).to(self.dtype))
        self.register_buffer("L_init", truncated_normal(arch.hidden_size, std=1).to(self.dtype))
        # Recorded results depend on the order of initialization. Modules are registered in the order of use.
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
        H = perturbed(self.H_level, reasoning, rng, self.rotary, name="H")
        L = perturbed(self.L_level, reasoning, rng, self.rotary, name="L")
        z_H, z_L = state["z_H"], state["z_L"]
        for cycle in range(reasoning.H_cycles):
            is_last_cycle = cycle == reasoning.H_cycles - 1
            whole_cycle_has_gradient = cycle >= reasoning.H_cycles - self.arch.gradient_cycles
            injection = z_H + e
            for call in range(reasoning.L_cycles):
                is_last_call = is_last_cycle and call == reasoning.L_cycles - 1
                with gradient_if(whole_cycle_has_gradient or is_last_call):
                    z_L = L(z_L, injection)
            with gradient_if(whole_cycle_has_gradient or is_last_cycle):
                z_H = H(z_H, z_L)
        return {"z_H": z_H.detach(), "z_L": z_L.detach()}, self.answer(z_H)


NETWORK = HRM

"""The Tiny Recursive Model (TRM, arXiv 2510.04871): one small level that updates both z_L and z_H."""

from torch import Tensor

from config.architecture import TRMConfig
from dataset.format import Metadata
from models.blocks import Level, build_block
from models.carry import Prediction, Reasoning, State
from models.embedding import build_positions, build_puzzle_table, embed_puzzle
from models.layers import Embedding, Linear, truncated_normal
from models.network import Network
from models.q_head import QHead, QLearning
from models.random import Draws
from models.updates import GATE_WEIGHTS, Gate, GatedUpdates, gradient, initial_gates, with_step_noise


class TRM(Network):
    """The network of TRM. A state is [batch, positions, hidden]: those of the puzzle embedding, then cells.

    A thinking step, with a level L (a stack of blocks) and the embedded puzzle e:

        H_cycles times:  L_cycles times z_L = L(z_L + z_H + e), then z_H = L(z_H + z_L)

    With `single_z` (table 2 of the paper) z_H is both: L_cycles times z_H = L(z_H + e), then z_H = L(z_H).
    Only the last `gradient_cycles` H cycles carry gradient; with 0, only the last call for each state does.
    With `update=gate` each state z_X has a `Gate`, and a slot also keeps log_D_X.
    """

    objective_class = QLearning
    undecayed = GATE_WEIGHTS

    def __init__(self, arch: TRMConfig, metadata: Metadata):
        super().__init__(arch)
        width, self.states = arch.hidden_size, ("z_H",) if arch.single_z else ("z_H", "z_L")

        # Weights are drawn in an order that recorded results depend on, and registered in the order of use.
        self.embed_tokens = Embedding(metadata.vocab_size, width, std=width**-0.5, dtype=self.dtype)
        self.puzzle_emb = build_puzzle_table(arch, metadata, width=arch.puzzle_emb_ndim)
        self.embed_pos, rotary = build_positions(arch, metadata, dtype=self.dtype)
        self.register_buffer("rotary", rotary, persistent=False)
        for axis in "H" if arch.single_z else "HL":  # drawn, never trained
            self.register_buffer(f"{axis}_init", truncated_normal(width, std=1).to(self.dtype))
        lm_head, q_head = Linear(width, metadata.vocab_size), QHead(width, reads_mean=arch.conv == "instead")
        self.L_level = Level(build_block(arch, metadata) for _ in range(arch.L_layers))
        self.lm_head, self.q_head = lm_head, q_head
        self.gates: dict[str, Gate] = {}
        for name in self.states if arch.update == "gate" else ():
            self.gates[name] = Gate(width, eps=arch.rms_norm_eps)
            self.add_module(name.replace("z", "gate"), self.gates[name])

    def initial_state(self, batch_size: int, *, seq_len: int) -> State:
        shape = batch_size, self.arch.num_puzzle_positions + seq_len, self.arch.hidden_size
        state = {name: self.get_buffer(f"{name[-1]}_init").expand(shape) for name in self.states}
        return state | initial_gates(self.gates, state)

    def forward(
        self,
        state: State,
        inputs: Tensor,
        puzzle_identifiers: Tensor,
        *,
        reasoning: Reasoning,
        draws: Draws | None = None,
    ) -> tuple[State, Prediction]:
        arch, L = self.arch, self.L_level
        state = with_step_noise(state, reasoning, draws)
        e = embed_puzzle(
            inputs,
            puzzle_identifiers,
            tokens=self.embed_tokens,
            puzzles=self.puzzle_emb,
            positions=self.embed_pos,
            num_puzzle_positions=arch.num_puzzle_positions,
        )
        # z = what a level returns; with damping, noise or a gate, only in part.
        update = GatedUpdates(self.gates, state, reasoning, draws)
        z_H, z_L = state["z_H"], state.get("z_L")
        for cycle in range(reasoning.H_cycles):
            is_last = cycle == reasoning.H_cycles - 1
            has_gradient = reasoning.H_cycles - cycle <= arch.gradient_cycles
            injection = e if arch.single_z else z_H + e
            for call in range(reasoning.L_cycles):
                with gradient(has_gradient or (is_last and call == reasoning.L_cycles - 1)):
                    if arch.single_z:
                        z_H = update("z_H", z_H, L(z_H, injection, self.rotary), at=f"{cycle} {call}")
                    else:
                        z_L = update("z_L", z_L, L(z_L, injection, self.rotary), at=f"{cycle} {call}")
            with gradient(has_gradient or is_last):
                z_H = update("z_H", z_H, L(z_H, 0 if arch.single_z else z_L, self.rotary), at=f"{cycle}")

        logits, q = self.lm_head(z_H)[:, arch.num_puzzle_positions :], self.q_head(z_H)
        after = {"z_H": z_H, "z_L": z_L, **update.kept}
        return {name: after[name].detach() for name in state}, Prediction(logits, q[:, 0], q[:, 1])


NETWORK = TRM

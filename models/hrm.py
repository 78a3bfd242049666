"""The Hierarchical Reasoning Model (HRM, arXiv 2506.21734): a slow and a fast level, called in turns."""

from torch import Tensor

from config.architecture import HRMConfig
from dataset.format import Metadata
from models.blocks import Level, build_block
from models.carry import Prediction, Reasoning, State
from models.embedding import build_positions, build_puzzle_table, embed_puzzle
from models.layers import Embedding, Linear, truncated_normal
from models.network import Network
from models.q_head import QHead, QLearning
from models.random import Draws
from models.updates import GATE_WEIGHTS, Gate, GatedUpdates, gradient, initial_gates, with_step_noise


class HRM(Network):
    """The network of HRM. A state is [batch, positions, hidden]: those of the puzzle embedding, then cells.

    A thinking step, with two levels H and L (stacks of blocks) and the embedded puzzle e:

        H_cycles times:  L_cycles times z_L = L(z_L + z_H + e), then z_H = H(z_H + z_L)

    The one-step gradient (section 2 of the paper): with gradient_cycles=0, only the last call of L and the
    last call of H carry gradient; otherwise all calls in the last `gradient_cycles` H cycles do. With
    `update=gate` each state z_X has a `Gate`, and a slot also keeps log_D_X.
    """

    objective_class = QLearning
    undecayed = GATE_WEIGHTS

    def __init__(self, arch: HRMConfig, metadata: Metadata):
        super().__init__(arch)
        width = arch.hidden_size

        # Weights are drawn in an order that recorded results depend on, and registered in the order of use.
        self.embed_tokens = Embedding(metadata.vocab_size, width, std=width**-0.5, dtype=self.dtype)
        self.puzzle_emb = build_puzzle_table(arch, metadata, width=arch.puzzle_emb_ndim)
        self.embed_pos, rotary = build_positions(arch, metadata, dtype=self.dtype)
        self.register_buffer("rotary", rotary, persistent=False)
        self.register_buffer("H_init", truncated_normal(width, std=1).to(self.dtype))  # never trained
        self.register_buffer("L_init", truncated_normal(width, std=1).to(self.dtype))
        lm_head, q_head = Linear(width, metadata.vocab_size), QHead(width, reads_mean=arch.conv == "instead")
        H_level = Level(build_block(arch, metadata) for _ in range(arch.H_layers))
        self.L_level = Level(build_block(arch, metadata) for _ in range(arch.L_layers))
        self.H_level, self.lm_head, self.q_head = H_level, lm_head, q_head
        self.gates: dict[str, Gate] = {}
        if arch.update == "gate":
            self.gate_H, self.gate_L = (Gate(width, eps=arch.rms_norm_eps) for _ in range(2))
            self.gates = {"z_H": self.gate_H, "z_L": self.gate_L}

    def initial_state(self, batch_size: int, *, seq_len: int) -> State:
        shape = batch_size, self.arch.num_puzzle_positions + seq_len, self.arch.hidden_size
        state = {"z_H": self.H_init.expand(shape), "z_L": self.L_init.expand(shape)}
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
        arch = self.arch
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
        z_H, z_L = state["z_H"], state["z_L"]
        for cycle in range(reasoning.H_cycles):
            is_last = cycle == reasoning.H_cycles - 1
            has_gradient = reasoning.H_cycles - cycle <= arch.gradient_cycles
            injection = z_H + e
            for call in range(reasoning.L_cycles):
                with gradient(has_gradient or (is_last and call == reasoning.L_cycles - 1)):
                    proposed = self.L_level(z_L, injection, self.rotary)
                    z_L = update("z_L", z_L, proposed, at=f"{cycle} {call}")
            with gradient(has_gradient or is_last):
                z_H = update("z_H", z_H, self.H_level(z_H, z_L, self.rotary), at=f"{cycle}")

        logits, q = self.lm_head(z_H)[:, arch.num_puzzle_positions :], self.q_head(z_H)
        after = {"z_H": z_H, "z_L": z_L, **update.kept}
        return {name: each.detach() for name, each in after.items()}, Prediction(logits, q[:, 0], q[:, 1])


NETWORK = HRM

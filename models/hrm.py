"""The Hierarchical Reasoning Model (HRM, arXiv 2506.21734): a slow and a fast level, called in turns.

The model works on a batch of puzzles. A slot is one position of the batch, and works on one puzzle at a time.
A training step runs one thinking step of every slot. The texts below describe the default keys
(config/pretrain.yaml, config/arch/hrm.yaml).

Thinking step      `HRM.forward` below: two H cycles. An H cycle calls level L twice, then level H once.
Gradient           The last call of L and the last call of H have gradient. All earlier calls, and earlier
                   thinking steps, have none.
Puzzle embedding   A learned vector for each puzzle identifier, in position 0, before the cells. It is updated
                   as in TRM (models/puzzle_embedding.py).
Halting            Training: A slot halts after 16 thinking steps, or earlier if q_halt > q_continue and
                   exploration allows it. Evaluation: By default after 16 steps (models/halting.py).
Loss               The stablemax cross-entropy of the answer, plus 0.5 times the binary cross-entropies of
                   q_halt and of q_continue. The target of q_halt is 1 if the answer is right. The target of
                   q_continue is sigmoid(max(q_halt, q_continue)) after one more thinking step without
                   gradient. After the 16th step, it is the sigmoid(q_halt) of one more step
                   (models/objective.py).
"""

from torch import Tensor

from config.architecture import HRMConfig
from dataset.metadata import Metadata
from models.blocks import Level, build_block
from models.carry import Prediction, Reasoning, State
from models.layers import Linear, truncated_normal
from models.network import TokenNetwork, build_q_head, gradient_if
from models.noise import perturbed
from models.random import SlotRng


class HRM(TokenNetwork):
    """The network of HRM (arXiv 2506.21734). Each puzzle has two hidden states, z_H and z_L.

    One call of the network (a thinking step):

        H_cycles times:
            L_cycles times:  z_L = L(z_L, z_H + e)
            once:            z_H = H(z_H, z_L)
        logits = lm_head(z_H at the cells)
        q_halt, q_continue = q_head(z_H at position 0; with arch.conv=instead, the mean over positions)

    e is the embedded puzzle. L(z, x) applies a stack of transformer blocks, `L_level`, to the sum z + x.
    H(z, x) applies another stack, `H_level`. By default, H_cycles and L_cycles are 2, each stack has 4
    blocks, and the network wants to halt if q_halt > q_continue.

    e, z_H and z_L are [batch, positions, hidden] in the dtype of the activations. The first positions contain
    the puzzle embedding (by default 1 position). The cells (tokens) of the puzzle follow.

    By default, only the last call of L and the last call of H have gradient (section 2 of the paper). If
    gradient_cycles is not 0, all calls in the last `gradient_cycles` H cycles have gradient. The embeddings
    and the heads always have gradient. The returned states are detached.
    """

    def __init__(self, arch: HRMConfig, metadata: Metadata):
        super().__init__(arch, metadata)  # builds embed_tokens, puzzle_emb, embed_pos and rotary
        # The state of a slot that starts: random vectors, equal at all positions, never trained.
        self.register_buffer("H_init", truncated_normal(arch.hidden_size, std=1).to(self.dtype))
        self.register_buffer("L_init", truncated_normal(arch.hidden_size, std=1).to(self.dtype))
        # Created in this order, because all initial weights are sampled from one random generator.
        lm_head, q_head = Linear(arch.hidden_size, metadata.vocab_size), build_q_head(arch.hidden_size)
        H_level = Level(build_block(arch, metadata) for _ in range(arch.H_layers))
        L_level = Level(build_block(arch, metadata) for _ in range(arch.L_layers))
        # Assigned in the order in which `forward` uses them (docstring of `Network`).
        self.L_level, self.H_level = L_level, H_level
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
        # `perturbed` adds damping and noise to a level (models/noise.py). Both are off by default. The names
        # "H" and "L" only give the noise of the two levels different random numbers.
        H = perturbed(self.H_level, reasoning, rng, self.rotary, name="H")
        L = perturbed(self.L_level, reasoning, rng, self.rotary, name="L")
        z_H, z_L = state["z_H"], state["z_L"]
        # In the H cycles from this index on, all calls have gradient. With gradient_cycles=0, there is none.
        first_with_gradient = reasoning.H_cycles - self.arch.gradient_cycles
        for cycle in range(reasoning.H_cycles):
            has_gradient = cycle >= first_with_gradient
            is_last_cycle = cycle == reasoning.H_cycles - 1
            # All calls of L in a cycle read the same x. In calls with gradient, e gets its
            # gradient through x.
            x = z_H + e
            for call in range(reasoning.L_cycles):
                is_last_call = is_last_cycle and call == reasoning.L_cycles - 1
                with gradient_if(has_gradient or is_last_call):
                    z_L = L(z_L, x)
            with gradient_if(has_gradient or is_last_cycle):
                z_H = H(z_H, z_L)
        return {"z_H": z_H.detach(), "z_L": z_L.detach()}, self.answer(z_H)


NETWORK = HRM

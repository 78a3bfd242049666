"""The Tiny Recursive Model (TRM, arXiv 2510.04871): one small level updates both z_L and z_H.

The model works on a batch of puzzles. A slot is one position of the batch, and works on one puzzle at a time.
A training step runs one thinking step of every slot. The texts below describe the default keys
(config/pretrain.yaml, config/arch/trm.yaml).

Thinking step      `TRM.forward` below: three H cycles. An H cycle calls the level six times for z_L, then
                   once for z_H.
Gradient           The calls of the last H cycle have gradient. The calls of earlier H cycles, and earlier
                   thinking steps, have none.
Puzzle embedding   A learned vector for each puzzle identifier. `TokenNetwork.embed` (models/network.py) puts
                   the vector into position 0, before the cells. Positions 1 to 15 are zeros. In each training
                   step, sign SGD with weight decay updates the vectors of the puzzles in the batch
                   (models/puzzle_embedding.py).
Halting            Training: A slot halts after 16 thinking steps, or earlier if q_halt > 0. In each training
                   step, a slot explores with probability 0.1: it samples a minimum from 2 to 16. If the slot
                   has made fewer thinking steps on its puzzle, it does not halt in this training step. The
                   next training step samples again.
                   Evaluation: With halting=max, the default, every slot runs 16 thinking steps. With
                   halting=act, slots halt as in training, but do not explore (models/halting.py).
Loss               Loss of a slot: the mean over its labeled cells of the stablemax cross-entropy, plus 0.5
                   times the binary cross-entropy of q_halt. The target of q_halt is 1 if all labeled cells
                   are right. The loss of a training step is the sum over all slots, divided by the number of
                   slots of the global batch (models/objective.py).
"""

from torch import Tensor

from config.architecture import TRMConfig
from dataset.metadata import Metadata
from models.blocks import Level, build_block
from models.carry import Prediction, Reasoning, State
from models.layers import Linear, truncated_normal
from models.network import TokenNetwork, build_q_head, gradient_if
from models.noise import perturbed
from models.random import SlotRng


class TRM(TokenNetwork):
    """The network of TRM (arXiv 2510.04871). Each puzzle has two hidden states, z_H and z_L.

    One call of the network (a thinking step):

        H_cycles times:
            L_cycles times:  z_L = L(z_L, z_H + e)
            once:            z_H = L(z_H, z_L)
        logits = lm_head(z_H at the cells)
        q_halt, q_continue = q_head(z_H at position 0; with arch.conv=instead, the mean over positions)

    e is the embedded puzzle. L(z, x) applies a stack of `L_layers` transformer blocks to the sum z + x. By
    default, H_cycles is 3, L_cycles is 6, and the stack has 2 blocks. q_halt decides when a puzzle halts.
    q_continue has no effect by default. The paper uses the names y for z_H, and z for z_L.

    e, z_H and z_L are [batch, positions, hidden] in the dtype of the activations. The first positions contain
    the puzzle embedding (by default 16 positions). The cells (tokens) of the puzzle follow.

    All calls of L in the last `gradient_cycles` H cycles have gradient (by default in the last one). If
    gradient_cycles is 0, only the last call for each state has gradient. The embeddings and the heads always
    have gradient. The returned states are detached.
    """

    def __init__(self, arch: TRMConfig, metadata: Metadata):
        super().__init__(arch, metadata)  # builds embed_tokens, puzzle_emb, embed_pos and rotary
        # The state of a slot that starts: random vectors, equal at all positions, never trained.
        self.register_buffer("H_init", truncated_normal(arch.hidden_size, std=1).to(self.dtype))
        self.register_buffer("L_init", truncated_normal(arch.hidden_size, std=1).to(self.dtype))
        # Created in this order, because all initial weights are sampled from one random generator.
        lm_head, q_head = Linear(arch.hidden_size, metadata.vocab_size), build_q_head(arch.hidden_size)
        L_level = Level(build_block(arch, metadata) for _ in range(arch.L_layers))
        # Assigned in the order in which `forward` uses them (docstring of `Network`).
        self.L_level, self.lm_head, self.q_head = L_level, lm_head, q_head

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
        # `perturbed` adds damping and noise to the level (models/noise.py). Both are off by default.
        L = perturbed(self.L_level, reasoning, rng, self.rotary)
        z_H, z_L = state["z_H"], state["z_L"]
        # In the H cycles from this index on, all calls have gradient. With gradient_cycles=0, there is none.
        first_with_gradient = reasoning.H_cycles - self.arch.gradient_cycles
        for cycle in range(reasoning.H_cycles):
            has_gradient = cycle >= first_with_gradient
            is_last_cycle = cycle == reasoning.H_cycles - 1
            # All calls for z_L in a cycle read the same x. In calls with gradient, e gets its
            # gradient through x.
            x = z_H + e
            for call in range(reasoning.L_cycles):
                is_last_call = is_last_cycle and call == reasoning.L_cycles - 1
                with gradient_if(has_gradient or is_last_call):
                    z_L = L(z_L, x)
            with gradient_if(has_gradient or is_last_cycle):
                z_H = L(z_H, z_L)
        return {"z_H": z_H.detach(), "z_L": z_L.detach()}, self.answer(z_H)


NETWORK = TRM

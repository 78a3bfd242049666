"""The interface of a network: one thinking step, from a state and puzzles to the next state and an answer."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from config.architecture import ArchConfig
from dataset.loader import Batch
from models.carry import Prediction, Reasoning, State
from models.embedding import PuzzleEmbedding
from models.objective import Objective
from models.random import Draws


class Network(nn.Module):
    """The base of networks. A model's file has a subclass, called NETWORK there, with these three methods:

    __init__(arch, metadata)  builds the modules, in the order of use: the backward pass then completes
                              gradients, and ranks send them, in about the reverse order
    initial_state             of a slot that starts; {}: the network keeps none
    forward                   one thinking step

    objective_class  of `objective`: what training makes small, and when slots halt
    undecayed        names of weights without weight decay
    dtype            of activations
    puzzle_emb       the puzzle embeddings; None without them
    """

    objective_class: ClassVar[type[Objective]]
    undecayed: ClassVar[tuple[str, ...]] = ()
    puzzle_emb: PuzzleEmbedding | None

    def __init__(self, arch: ArchConfig):
        super().__init__()
        self.arch, self.objective = arch, self.objective_class(self, arch)
        self.dtype, self.puzzle_emb = choose_dtype(arch.forward_dtype), None

    def initial_state(self, batch_size: int, *, seq_len: int) -> State:
        """Returns the state of slots that start, by names such as z_H, each [batch_size, ..., hidden]."""
        return {}

    def start(self, data: Batch, reasoning: Reasoning, draws: Draws | None, fresh: Tensor) -> State:
        """Returns the state of slots that start on `data`: as in EqR with noise, where there is init_noise.

        fresh: bool [batch], the slots that start; callers ignore other rows. With init_noise each z_X is
        normal noise of that standard deviation, cut at 2 sigma.
        """
        state = self.initial_state(len(data.inputs), seq_len=data.inputs.shape[1])
        if reasoning.init_noise and draws is not None:
            slots = fresh.nonzero().flatten()
            draws = draws[slots]
            for name in (name for name in state if name.startswith("z_")):
                noise = draws.truncated_normal(state[name].shape[1:], use=f"start {name}")
                noise = (reasoning.init_noise * noise).to(self.dtype)
                state[name] = state[name].index_copy(0, slots, noise)
        return state

    def forward(
        self,
        state: State,
        inputs: Tensor,
        puzzle_identifiers: Tensor,
        *,
        reasoning: Reasoning,
        draws: Draws | None = None,
    ) -> tuple[State, Prediction]:
        """Runs one thinking step; returns the new state, detached, and the prediction.

        inputs: int32 [batch, seq_len]. puzzle_identifiers: int32 [batch]. draws: needed for noise or dropout.
        """
        raise NotImplementedError


def choose_dtype(name: str) -> torch.dtype:
    """Returns the dtype of a forward_dtype; auto: bfloat16, or float32 if CUDA only emulates bfloat16."""
    emulates = torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False)
    return getattr(torch, {"auto": "float32" if emulates else "bfloat16"}.get(name, name))

"""The models that the benchmarks train: HRM with 27 M parameters on 9x9 Sudoku, or TRM, or tiny ones.

Plain values stand for the config, and random tokens for the data: a machine with torch and numpy alone can
measure. tests/test_benchmarks.py holds the values against config/.
"""

from types import SimpleNamespace
from typing import Any

import torch

from dataset.format import Batch
from training.state import TrainState, build_train_state

FACTS = SimpleNamespace(vocab_size=11, seq_len=81, num_puzzle_identifiers=1000)

_ARCH = {
    "name": "hrm",
    "hidden_size": 512,
    "num_heads": 8,
    "expansion": 4,
    "H_cycles": 2,
    "L_cycles": 2,
    "H_layers": 4,
    "L_layers": 4,
    "halt_max_steps": 16,
    "halt_exploration_prob": 0.1,
    "no_ACT_continue": False,
    "q_target": "exact",
    "gradient_cycles": 0,
    "mlp_t": False,
    "pos_encodings": "rope",
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "puzzle_emb_ndim": 512,
    "puzzle_emb_len": 0,
    "forward_dtype": "bfloat16",
}
_TRM = _ARCH | {
    "name": "trm",
    "H_cycles": 3,
    "L_cycles": 6,
    "H_layers": 0,
    "L_layers": 2,
    "no_ACT_continue": True,
    "gradient_cycles": 1,
    "puzzle_emb_len": 16,
}
_TINY = {"hidden_size": 128, "num_heads": 4, "puzzle_emb_ndim": 128, "H_layers": 1, "L_layers": 1}
_CONFIG = {
    "seed": 0,
    "lr": 1e-4,
    "lr_min_ratio": 1.0,
    "lr_warmup_steps": 2000,
    "beta1": 0.9,
    "beta2": 0.95,
    "weight_decay": 0.1,
    "puzzle_emb_lr": 1e-2,
    "puzzle_emb_weight_decay": 0.1,
    "optimizer": "adam_atan2",
    "lr_scaling": "none",
    "puzzle_emb_lr_scaling": "none",
    "lr_reference_batch_size": 768,
    "ema": None,
    "train_only": "all",
    "grad_clip_norm": None,
    "gradient_accumulation_steps": 1,
    "activation_checkpointing": "none",
    "sync": "flat",
    "bucket_size_mb": "auto",
    "gradient_dtype": "float32",
}


def hrm_config(*, global_batch_size: int, is_tiny: bool = False, **changes: Any) -> SimpleNamespace:
    """What building a training state and a training step read of a config."""
    return _config(_ARCH | (_TINY if is_tiny else {}), global_batch_size, changes)


def sized_config(name: str, *, global_batch_size: int, **sizes: Any) -> SimpleNamespace:
    """The same of hrm or trm with other values of `arch`; the puzzle embedding is as wide as the model."""
    arch = {"hrm": _ARCH, "trm": _TRM}[name] | sizes
    return _config(arch | {"puzzle_emb_ndim": arch["hidden_size"]}, global_batch_size, {})


def _config(arch: dict[str, Any], global_batch_size: int, changes: dict[str, Any]) -> SimpleNamespace:
    loss = SimpleNamespace(loss_type="stablemax_cross_entropy", label_smoothing=0.0, halting_weight=0.5)
    positions = arch["puzzle_emb_len"] or 1  # in front of the tokens
    return SimpleNamespace(
        **_CONFIG | {"global_batch_size": global_batch_size} | changes,
        arch=SimpleNamespace(**arch, puzzle_emb_positions=positions, loss=loss),
    )


def build_trainee(
    config: SimpleNamespace, device: torch.device, *, facts: SimpleNamespace = FACTS, compiles: bool = False
) -> TrainState:
    """The state of a run at step 0, in training mode. All ranks call it."""
    state = build_train_state(config, facts, device=device, compiles=compiles)
    state.model.train()
    return state


def random_batch(
    batch_size: int, *, seed: int, device: torch.device, facts: SimpleNamespace = FACTS
) -> Batch:
    """Random tokens, labels and identifiers."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator, dtype=torch.int32)

    return Batch(
        inputs=draw(facts.vocab_size, batch_size, facts.seq_len),
        labels=draw(facts.vocab_size, batch_size, facts.seq_len),
        puzzle_identifiers=draw(facts.num_puzzle_identifiers, batch_size),
        rows=torch.arange(batch_size),
    ).to(device)

"""What only a GPU can show; skipped where there is none. `benchmarks/gpu.sh` runs it."""

import pytest
import torch

from benchmarks.worlds import Trainer
from tests import golden

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

_SIZES = ("arch.hidden_size=32", "arch.num_heads=2", "arch.L_layers=1", "arch.H_cycles=2", "arch.L_cycles=2")
_SIZES_OF = {
    "hrm": ("arch.H_layers=1",),
    "serrm": ("arch.num_heads_t=2", "arch.head_dim=8", "arch.head_dim_t=8"),
}
_WARMUP_STEPS = 5


@pytest.mark.parametrize("name", ["hrm", "trm", "urm", "serrm"])
def test_the_host_waits_for_the_device_only_where_it_logs(name):
    """Unless q_target is deferred: then it waits once a step, for the number of slots that stop."""
    words = (f"arch={name}", *_SIZES, *_SIZES_OF.get(name, ()), "arch.forward_dtype=float32", "ema=0.9")
    words += ("arch.q_target=exact",) if name == "hrm" else ()
    trainer = Trainer(torch.device("cuda"), *words, puzzles=8)
    for _ in range(_WARMUP_STEPS):
        trainer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            trainer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_golden_training_is_replayed():
    for run in golden.find_runs():
        golden.replay(run, device=torch.device("cuda"))

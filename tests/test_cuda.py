"""What only a GPU can show; skipped where there is none. `benchmarks.gpu` runs it on a borrowed one.

Needs nothing but torch, numpy and pytest.
"""

import pytest
import torch

from benchmarks.gpu.static import Static
from benchmarks.gpu.steps import find_host_wait
from benchmarks.train_step.contenders import Ours
from benchmarks.trainee import METADATA, build_config
from tests import golden

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

MODELS = ("hrm", "trm", "urm", "serrm")
_SIZES = {
    "hidden_size": 32,
    "num_heads": 2,
    "L_layers": 1,
    "H_cycles": 2,
    "L_cycles": 2,
    "forward_dtype": "float32",
}
_SIZES_OF = {"hrm": {"H_layers": 1}, "serrm": {"num_heads_t": 2, "head_dim": 8, "head_dim_t": 8}}


def _config(name: str):
    sizes = {**_SIZES, **_SIZES_OF.get(name, {})}
    return build_config(name, sizes=sizes, global_batch_size=8, ema=0.9)


@pytest.mark.parametrize("name", MODELS)
def test_the_host_waits_for_the_device_only_where_it_logs(name):
    """Unless q_target is deferred: then it waits once a step, for the number of slots that stop."""
    contender = Ours("ours", _config(name), METADATA, torch.device("cuda"))
    assert find_host_wait(contender.step) is None
    contender._finite.check()


@pytest.mark.parametrize("name", MODELS)
def test_a_replayed_step_is_the_step(name):
    cuda = torch.device("cuda")
    ours, replayed = (kind("ours", _config(name), METADATA, cuda) for kind in (Ours, Static))
    for _ in range(8):
        torch.testing.assert_close(replayed.step().loss, ours.step().loss, rtol=1e-4, atol=0)
    for own, theirs in zip(ours.state.model.parameters(), replayed.state.model.parameters(), strict=True):
        torch.testing.assert_close(theirs, own, rtol=0, atol=1e-3)


def test_golden_training_is_replayed(golden_folder):
    for run in golden.find_runs(golden_folder):
        golden.replay(run, device=torch.device("cuda"))

"""What only a GPU can show; skipped where there is none."""

import pytest
import torch

from tests.tiny import FACTS, random_batch, tiny_arch, tiny_config
from training.clock import StepClock
from training.metrics import FiniteCheck
from training.state import build_train_state
from training.step import train_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.mark.parametrize("name", ["hrm", "trm"])
def test_the_host_waits_for_the_device_only_where_it_logs(name):
    """Unless q_target is deferred: then it waits once a step, for the number of slots that stop."""
    device = torch.device("cuda")
    config = tiny_config(device="cuda", ema=0.9, arch=tiny_arch(name, q_target="exact").model_dump())
    state = build_train_state(config, FACTS, device=device)
    state.model.train()
    clock, finite = StepClock(device), FiniteCheck(device)
    batches = [random_batch(config.global_batch_size, seed=seed).to(device) for seed in range(6)]

    def step(batch):
        clock.start()
        result = train_step(state, batch, config=config, total_steps=20, clock=clock)
        finite.add(state.step, set_name="all", loss=result.loss, grad_norm=result.grad_norm)
        clock.count_step()

    for batch in batches[:3]:  # allocates, loads kernels
        step(batch)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for batch in batches[3:]:
            step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    finite.check()

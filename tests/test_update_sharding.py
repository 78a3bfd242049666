"""Each rank updates a share of the weights: the bits of a run without shares, on any number of ranks."""

from pathlib import Path

import pytest
import torch

from checkpointing.tensors import load_joined
from distributed.collectives import ALONE, all_ranks
from distributed.flat import FlatParameters
from distributed.shards import tensor_of
from models.blocks import block_weights
from models.compilation import COMPILER_OPTIONS
from optimizers.rules.adam_atan2 import AdamATan2
from tests.checkpoints import assert_equal, begin_training, do_step, open_checkpoints
from tests.ranks import call_each, run_ranks
from tests.tiny import random_batch, tiny_arch, tiny_config, tiny_model

_PARTS = ("weights", "ema_weights", "optimizer", "ema_state")


def _bfloat16(name: str) -> dict:
    return tiny_arch(name, forward_dtype="bfloat16").model_dump()


# What shares may not change.
_RUNS = {
    "adam_atan2": {},
    "flat": {"sync": "flat"},
    "gate": {"arch": tiny_arch("infiloop").model_dump()},
    "ddp adamw": {"optimizer": "adamw", "sync": "ddp"},
    "muon": {"optimizer": "muon"},
    "bfloat16 adamw": {"optimizer": "adamw", "arch": _bfloat16("trm")},
    "bfloat16 flat muon": {"optimizer": "muon", "sync": "flat", "arch": _bfloat16("urm")},
}


def _train(
    folder: Path, options: dict, last_step: int, degrees: tuple[str, ...] = ("1", "-1")
) -> dict[str, int]:
    """Goes on with a run without and one with shares; returns how many numbers of moments each keeps here."""
    kept = {}
    for sharding in degrees:
        changes = {**options, "data_parallel_shard_degree": int(sharding), "ema": 0.9, "grad_clip_norm": 0.01}
        run, config = folder / sharding, tiny_config(**changes)
        run.mkdir(parents=True, exist_ok=True)
        state = begin_training(config)
        with open_checkpoints(run, **changes) as checkpoints:
            checkpoints.resume(state)
            for step in range(state.step, last_step):
                do_step(state, config, random_batch(24, seed=step))
            checkpoints.save(state)
        moments = state.weights.moments().items()
        kept[sharding] = sum(tensor_of(each).numel() for name, each in moments if "step." not in name)
    return kept


@pytest.mark.long
@pytest.mark.slow
def test_shares_have_the_bits_of_the_whole_also_resumed_on_other_numbers_of_ranks(tmp_path):
    for size, last_step in ((3, 3), (2, 5), (1, 6)):
        cases = [(tmp_path / name, options, last_step) for name, options in _RUNS.items()]
        for name, *kept in zip(_RUNS, *run_ranks(call_each, size, _train, cases), strict=True):
            for part in _PARTS:
                folders = (tmp_path / name / sharding / f"step_{last_step}" for sharding in ("-1", "1"))
                assert_equal(*(load_joined(folder, part) for folder in folders))
            whole, parts = kept[0]["1"], [each["-1"] for each in kept]
            is_mixed = "bfloat16" in name  # the rest is on every rank
            assert whole <= sum(parts) < 1.1 * whole if is_mixed else sum(parts) == whole, name
            assert size == 1 or max(parts) < 0.75 * whole, name
    assert (tmp_path / "muon" / "-1" / "step_5" / "optimizer_1_of_2.safetensors").is_file()


@pytest.mark.slow
def test_groups_that_share_are_replicas_of_each_other(tmp_path):
    options = {"ema": 0.9, "sync": "flat", "arch": _bfloat16("trm")}
    for size, last_step in ((4, 3), (4, 5)):
        kept = run_ranks(_train, size, tmp_path, options, last_step, ("1", "2"))
        assert 0.45 < kept[3]["2"] / kept[3]["1"] < 0.6
        for part in _PARTS:
            ours, theirs = (load_joined(tmp_path / n / f"step_{last_step}", part) for n in ("2", "1"))
            assert_equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("default")  # torch's compiler warns of its own doings
@pytest.mark.parametrize("names", [None, "matrices"])
def test_compiled_shares_have_the_bits_of_the_whole_and_nearly_the_values_of_eager_updates(
    monkeypatch, names
):
    """Compiled once. Three updates go 3.5 at most, each right to four units in the last place of float32.

    To that comes the rounding of the weights themselves, below 8, in six operations.
    """
    torch.compiler.reset()
    monkeypatch.setenv("WORLD_SIZE", "3")

    def trained(rank: int, *, is_sharded: bool, compiler_options=COMPILER_OPTIONS) -> FlatParameters:
        monkeypatch.setenv("RANK", str(rank))
        network, shard_group = tiny_model().network, all_ranks() if is_sharded else ALONE
        matrices = block_weights(network) if names else ()
        flat = FlatParameters(
            network.named_parameters(), ranks=all_ranks(), shard_group=shard_group, unsplit=matrices
        )
        options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1}
        of_adam = [name for name in flat.parameters if name not in matrices]
        optimizer = AdamATan2(flat, of_adam, compiler_options=compiler_options, **options)
        generator = torch.Generator().manual_seed(0)
        for lr in (0.1, 0.2, 0.05):
            flat.gradients.copy_(torch.randn(flat.size, generator=generator))
            optimizer.param_groups[0]["lr"] = lr
            with torch.compiler.set_stance("default" if lr == 0.1 else "fail_on_recompile"):
                optimizer.step()
        return flat

    whole = trained(0, is_sharded=False).weights
    eager = trained(0, is_sharded=False, compiler_options=None).weights
    assert eager.abs().max() < 8
    assert (whole - eager).abs().max() < 3.5 * 4 * 2**-23 + 6 * 8 * 2**-24
    updated = []
    for rank in range(3):
        flat = trained(rank, is_sharded=True)
        assert torch.equal(flat.weights[flat.shard], whole[flat.shard])
        updated.append(flat.shard)
    assert [updated[0].start, updated[-1].stop] == [0, len(whole)]
    assert [each.stop for each in updated[:-1]] == [each.start for each in updated[1:]]

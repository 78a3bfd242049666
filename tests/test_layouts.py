"""Five steps in every layout of the ranks are those of one process: what its checkpoints hold, joined.

In float64, with clipping, averages and slots that halt. The first moments are sums of all gradients, so that
an error in any of these shows. Refusals are in tests/mistakes.yaml.
"""

import itertools
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from checkpointing.tensors import load_joined, save_section
from checkpointing.writer import local_part
from config.schema import PretrainConfig
from distributed.collectives import ALONE, Ranks, barrier, broadcast_difference
from distributed.errors import lost_connection
from distributed.shards import Shard, tensor_of
from distributed.world import rank
from models import HaltingModel
from models.layers import Attention, SwiGLU
from tests.checkpoints import FINGERPRINT, assert_equal, begin_training, do_step
from tests.float64 import assert_close, in_float64
from tests.ranks import run_ranks
from tests.tiny import FACTS, random_batch, tiny_arch, tiny_config, tiny_model
from training.checkpoints import CheckpointManager
from training.cut import plan_of
from training.data import open_data
from training.model import build_local_model
from training.pictures import think_of_puzzles
from training.state import TrainState, build_first_state

_SLOTS, _STEPS = 8, 5  # slots halt after 4 steps at most
_PARTS = ("weights", "ema_weights", "ema_state", "optimizer", "carry")
ARCHS = {
    "hrm": {"H_layers": 2, "L_layers": 2, "q_target": "exact"},
    "trm": {"L_layers": 2},
    "infiloop": {"L_layers": 2},
    "urm": {"L_layers": 2},
    "serrm": {"L_layers": 2, "num_heads_t": 2},
    "transformer": {"num_layers": 2},
    "fprm": {"L_layers": 2},
    "flow": {"L_layers": 2},
}
_TENSOR = {"tensor_parallel_degree": 2}
_PIPELINE, _SHARDS = {"pipeline_parallel_degree": 2}, {"data_parallel_shard_degree": 2, "sync": "flat"}
# Number of ranks, and keys.
LAYOUTS = {
    "one": (1, {}),
    "dp2": (2, {}),
    "pp2": (2, _PIPELINE),
    "fsdp2": (2, _SHARDS),
    "dp2 x pp2": (4, _PIPELINE),
    "fsdp2 x pp2": (4, _PIPELINE | _SHARDS),
    "tp2": (2, _TENSOR),
    "dp2 x tp2": (4, _TENSOR),
    "tp2 x pp2": (4, _TENSOR | _PIPELINE),
    "fsdp2 x tp2": (4, _TENSOR | _SHARDS),
}


def build_config(name: str, layout: str, options: dict):
    options = {"ema": 0.9, "grad_clip_norm": 0.5, **LAYOUTS[layout][1], **options}
    arch = tiny_arch(name, **ARCHS[name], **options.pop("arch", {}))
    return tiny_config(arch=arch.model_dump(), global_batch_size=_SLOTS, **options)


def begin(name: str, layout: str, options: dict) -> tuple[TrainState, PretrainConfig]:
    """Returns the state of step 0, with a Q head by which slots halt at different steps; and the config."""
    state = begin_training(config := build_config(name, layout, options))
    if head := getattr(state.model.network, "q_head", None):
        with torch.no_grad():
            head.weight.copy_(torch.randn(head.weight.shape, generator=_generator()))
            head.bias.zero_()
        state.broadcast_model_()
    return state, config


Runs = dict[str, tuple[str, str, dict]]  # a model, a layout, and keys


def do_steps(state: TrainState, config: PretrainConfig, number: int, folder: Path) -> list[float]:
    """Writes what the state holds after so many steps; returns losses and norms."""
    numbers = []
    for _ in range(number):
        result = do_step(state, config, random_batch(_SLOTS, seed=state.step))
        numbers += [float(result.loss), float(result.grad_norm)]
    folder.mkdir(exist_ok=True, parents=True)
    for section, tensors in (state.sections() | state.exports()).items():
        save_section(local_part(tensors), folder, section)
    return numbers


def _train(folder: Path, runs: Runs) -> dict[str, list[float]]:
    found = {}
    for run, each in runs.items():
        found[run] = do_steps(*begin(*each), _STEPS, folder / run)
    barrier()
    return found


def save_in_the_middle(folder: Path, runs: Runs) -> None:
    """Saves each run after two steps, and goes on with two more."""
    for run, each in runs.items():
        state, config = begin(*each)
        do_steps(state, config, 2, folder / run)
        with CheckpointManager(folder / run, config=config, fingerprint=FINGERPRINT) as checkpoints:
            checkpoints.save(state)
        do_steps(state, config, 2, folder / run / "end")
    barrier()


def go_on(folder: Path, starts: list[str], runs: Runs) -> None:
    """Does two steps of each run from what each of the others has saved."""
    for start, (run, (name, layout, options)) in itertools.product(starts, runs.items()):
        (folder / start / run).mkdir(exist_ok=True)
        state, config = begin(name, layout, options | {"resume": str(folder / start / "step_2")})
        CheckpointManager(folder / start / run, config=config, fingerprint=FINGERPRINT).resume(state)
        do_steps(state, config, 2, folder / start / run)
    barrier()


def _stop_and_go_on(folder: Path, runs: Runs) -> None:
    save_in_the_middle(folder, runs)
    for run, each in runs.items():
        go_on(folder, [run], {run: each})


def assert_bits_of_resumed(folder: Path, runs: Runs, num_ranks: int) -> None:
    """Stops and resumes each run on so many ranks."""
    run_ranks(_stop_and_go_on, num_ranks, folder, runs)
    for run in runs:
        for part in _PARTS:
            ours, theirs = (load_joined(folder / run / end, part) for end in (run, "end"))
            assert_equal(ours, theirs)


def assert_files_close(ours: Path, theirs: Path) -> None:
    for part in _PARTS:
        found, expected = (load_joined(folder, part) for folder in (ours, theirs))
        assert found.keys() == expected.keys(), ours
        for key, value in expected.items():
            assert_close(found[key], value, what=f"{ours}: {part} {key}")


def _first_carry(runs: Runs) -> dict[str, dict]:
    """Returns this rank's share of the carry after one step of each run."""
    carries = {}
    for run, each in runs.items():
        state, config = begin(*each)
        do_step(state, config, random_batch(_SLOTS))
        carries[run] = state.carry.tensors()
    return carries


def assert_equal_to_one(folder: Path, runs: Runs) -> None:
    """Trains the runs, those of one number of ranks together, and one process for each model and options."""
    alone = {f"one {name} {options}": (name, "one", options) for name, _, options in runs.values()}
    (expected,) = run_ranks(in_float64, 1, _train, folder, alone)
    for size in sorted({LAYOUTS[layout][0] for _, layout, _ in runs.values()}):
        chosen = {run: each for run, each in runs.items() if LAYOUTS[each[1]][0] == size}
        for found in run_ranks(in_float64, size, _train, folder, chosen):
            for run, (name, _, options) in chosen.items():
                one = f"one {name} {options}"
                assert found[run] == pytest.approx(expected[one], rel=1e-9), run
        for run, (name, _, options) in chosen.items():
            assert_files_close(folder / run, folder / f"one {name} {options}")


# Of each layout one model; all pairs take minutes: tests/system/test_all_layouts.py.
_FEW = {"hrm": ("fsdp2 x pp2",), "serrm": ("tp2",), "urm": ("dp2 x pp2", "fsdp2 x tp2"), "flow": ("pp2",)}
ACCUMULATION = {"gradient_accumulation_steps": 2, "activation_checkpointing": "block"}


@pytest.mark.slow
def test_a_layout_of_a_model_is_one_process(tmp_path):
    runs = {f"{name} {layout}": (name, layout, {}) for name, layouts in _FEW.items() for layout in layouts}
    runs["table alone"] = ("trm", "tp2 x pp2", {"train_only": "puzzle_embeddings", "grad_clip_norm": None})
    assert_equal_to_one(tmp_path, runs)


@pytest.mark.slow
def test_networks_that_draw_or_keep_more_have_the_same_bits_when_resumed(tmp_path):
    conv = {"conv": "instead", "pos_encodings": "none", "puzzle_emb_ndim": 0, "forward_dtype": "bfloat16"}
    noise = {"init_noise": 1.0, "state_noise": 0.1, "damping": 0.9}
    runs = {
        "dropout": ("serrm", "dp2", {"arch": {"dropout": 0.2, "puzzle_emb_ndim": 1}}),
        "conv": ("trm", "dp2", {"arch": conv, "optimizer": "muon"}),
        "fixed point": ("fprm", "dp2", {}),
        "flow": ("flow", "dp2", {"arch": {"forward_dtype": "bfloat16"}}),
        "gate": ("infiloop", "dp2", {"arch": {"forward_dtype": "bfloat16"}} | ACCUMULATION),
        "noise": ("hrm", "dp2", {"arch": noise, "optimizer": "adamw", "weight_decay": 1.0}),
    }
    assert_bits_of_resumed(tmp_path, runs, 2)
    halted = load_joined(tmp_path / "dropout" / "end", "carry")["halted"]
    assert 0 < halted.sum() < len(halted), "stops are random"


def _build_divided(monkeypatch, model: HaltingModel, *, stages: int = 1, shares: int = 1, **keys) -> tuple:
    monkeypatch.setattr("training.model.build_model", lambda *_: model)
    groups = {"pipeline": Ranks(0, stages), "tensor": Ranks(0, shares), "owners": ALONE, "replicas": ALONE}
    mesh = SimpleNamespace(**groups, is_plain=stages * shares == 1)
    return build_local_model(tiny_config(**keys), FACTS, mesh, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ("", {"stages": 2}, "=2 does not divide the 3 blocks of L_level. Set a divisor of 3."),
        ("", {"shares": 5}, "=5 does not divide the 2 parts of L_level.layers.0.self_attn.qkv_proj.weight."),
        (
            "no level",
            {"activation_checkpointing": "block"},
            "=block needs blocks, but arch=hrm has no Level.",
        ),
        ("no level", {"tensor_parallel_degree": 2}, "=2 needs blocks, but arch=hrm has no Level."),
        ("parameter", {}, "the parameter lm_head.constant must be torch.float32 and need a gradient."),
        ("weight", {"shares": 2}, "but L_level.layers.1.mlp.gate_up_proj.weight is L_level.layers.0"),
        ("outside", {"shares": 2}, "but q_head.same is L_level.layers.0.mlp.down_proj.weight."),
        ("buffer", {"stages": 2}, "but L_level.layers.0.constant is one. Remove pipeline_parallel_degree."),
    ],
)
def test_a_network_of_a_plugin_that_cannot_be_trained_or_divided_is_refused(
    monkeypatch, capsys, change, options, message
):
    model = tiny_model("trm", L_layers=3)
    if change == "no level":
        monkeypatch.setattr("training.model.levels_of", lambda _: {})
    elif change == "parameter":
        model.network.lm_head.constant = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    elif change == "weight":
        model.network.L_level.layers[1].mlp = model.network.L_level.layers[0].mlp
    elif change == "outside":
        model.network.q_head.same = model.network.L_level.layers[0].mlp.down_proj.weight
    elif change == "buffer":
        model.network.L_level.layers[0].register_buffer("constant", torch.ones(1))
    with pytest.raises(SystemExit):
        _build_divided(monkeypatch, model, **options)
    assert message in capsys.readouterr().err


def test_tensor_parallel_ranks_divide_blocks_only(monkeypatch):
    model = tiny_model("trm")
    model.network.last = SwiGLU(32, expansion=1)  # as in the network of a plugin
    *_, cuts = _build_divided(monkeypatch, model, shares=2)
    assert {name.partition(".layers.")[0] for name in cuts} == {"L_level"}


def _begin_from_rank_0(folder: Path, layouts: list[str]) -> None:
    """Overwrites the weights with rank 0's copies of the whole, as init_from does, and writes them."""
    for layout in layouts:
        state = begin_training(build_config("trm", layout, {"arch": {"forward_dtype": "bfloat16"}}))
        shards = {n: each for n, each in state.sections()["weights"].items() if isinstance(each, Shard)}
        full = {name: _draw_weight(each.shape) for name, each in shards.items()}
        state.broadcast_model_(full if rank() == 0 else {})
        (folder / layout).mkdir(exist_ok=True, parents=True)
        save_section(local_part(state.sections()["weights"]), folder / layout, "weights")
    barrier()


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def _draw_weight(shape: tuple[int, ...]) -> torch.Tensor:
    """Draws a weight with all digits of float32, in another dtype, as a checkpoint may have."""
    return torch.randn(shape, generator=_generator()).double()


@pytest.mark.slow
def test_a_run_begins_with_whole_weights_that_rank_0_alone_has(tmp_path):
    layouts = ["fsdp2 x pp2", "tp2 x pp2"]
    run_ranks(_begin_from_rank_0, 4, tmp_path, layouts)
    for layout in layouts:
        found = {n: each for n, each in load_joined(tmp_path / layout, "weights").items() if ".layers." in n}
        assert len(found) == 8
        for name, value in found.items():
            assert torch.equal(value, _draw_weight(value.shape).float()), name


def _lose_the_last_stage() -> None:
    """Ends rank 1 in a step; asserts that rank 0 knows what an error this is."""
    state, config = begin("trm", "pp2", {})
    assert state.mesh.pipeline.group is not state.mesh.owners.group, "or NCCL waits forever: test_pipeline"
    do_step(state, config, random_batch(_SLOTS))
    if rank() == 1:
        state.model.network.L_level.run_blocks = lambda *_: os._exit(0)
    with pytest.raises(RuntimeError) as raised:
        do_step(state, config, random_batch(_SLOTS))
    assert lost_connection(raised.value)


@pytest.mark.slow
def test_a_stage_that_dies_ends_the_others():
    with pytest.raises(AssertionError, match=r"^rank 1: status 0$"):  # rank 0 has a result
        run_ranks(_lose_the_last_stage, 2)


@pytest.mark.slow
def test_the_first_carry_of_a_pipeline_has_the_bits_of_one_process():
    options = {"arch": {"forward_dtype": "bfloat16"}}
    runs = {name: (name, "pp2", options) for name in ("hrm", "trm", "serrm")}
    alone = {name: (name, "one", options) for name in runs}
    first, second = run_ranks(_first_carry, 2, runs)
    (expected,) = run_ranks(_first_carry, 1, alone)
    for name, carry in expected.items():
        assert carry["z_H"].abs().sum() > 0
        for key, value in carry.items():
            assert torch.equal(torch.cat((first[name][key], second[name][key])), value), f"{name}: {key}"


def _ask(layouts: list[str]) -> list[int]:
    """Does a step in which a signal has reached only rank 3. Returns how many requests this rank knows."""
    found = []
    for layout in layouts:
        state = begin_training(config := build_config("trm", layout, {}))
        result = do_step(state, config, random_batch(_SLOTS), is_asked_to_stop=lambda: rank() == 3)
        found.append(int(result.stop_requests))
    return found


@pytest.mark.slow
def test_all_ranks_know_that_one_of_them_got_a_signal():
    """Otherwise, some ranks stop, and the others wait for them until the watchdog ends the run."""
    for found in run_ranks(_ask, 4, ["fsdp2", "dp2 x pp2", "dp2 x tp2", "tp2 x pp2"]):
        assert found == [1] * 4


def test_tensor_parallelism_refuses_a_weight_of_a_block_without_a_plan(monkeypatch, capsys):
    """Such as that of a plugin's layer. Both ranks would save the full weight, each as another part of it."""
    monkeypatch.setattr(
        "training.model.plan_of", lambda each: plan_of(each) if isinstance(each, Attention) else None
    )
    with pytest.raises(SystemExit):
        _build_divided(monkeypatch, tiny_model("trm"), shares=2)
    refusal = "error: tensor_parallel_degree=2 cannot divide L_level.layers.0.mlp.down_proj.weight: "
    assert capsys.readouterr().err.startswith(refusal)


def _drift(layouts: list[str]) -> list[tuple[str, list[int], int] | None]:
    """Compares all that ranks hold, before and after rank 3 has changed its float32 master weights."""
    found = []
    for layout in layouts:
        state = begin_training(build_config("trm", layout, {"arch": {"forward_dtype": "bfloat16"}}))
        for has_changed in (False, True):
            for name, each in state.sections()["weights"].items():
                if has_changed and rank() == 3 and ".layers." in name:
                    tensor_of(each).add_(1)
            found.append(broadcast_difference(state.held()))
    return found


@pytest.mark.slow
def test_shares_and_parts_of_all_replicas_are_compared():
    for found in run_ranks(_drift, 4, ["fsdp2", "dp2 x pp2", "dp2 x tp2"]):
        assert found[::2] == [None] * 3
        assert [each[1:] for each in found[1::2]] == [([3], 1), ([3], 2), ([3], 1)]
        assert all(name.endswith("weight of weights") for name, *_ in found[1::2])


def _draw(data: Path, cases: list[tuple[str, dict]]) -> list[str]:
    found = []
    for layout, options in cases:
        opened = open_data(config := build_config("trm", layout, {"data_path": [str(data)]} | options))
        state = build_first_state(config, opened.dataset.metadata, device=torch.device("cpu"))
        state.model.network.puzzle_emb.weights.fill_(0.5)
        found.append(think_of_puzzles(state, opened, count=4).html())
    return found


@pytest.mark.slow
def test_pictures_are_those_of_one_process(sudoku_folder):
    ((alone,),) = run_ranks(in_float64, 1, _draw, sudoku_folder, [("one", {})])
    assert alone.count("</svg>") == 4
    cases = [("pp2", {}), ("tp2", {}), ("dp2", {"puzzle_emb_sharding": "rows"})]
    assert run_ranks(in_float64, 2, _draw, sudoku_folder, cases) == [[alone] * 3] * 2

"""A dry run: its formulas are what ranks keep and send, and what docs have; what does not fit is one line."""

import dataclasses
import gc
import math

import pytest
import torch
from torch import nn

from benchmarks.layouts import computed, counting, kept
from models import build_model, layers
from parallel.mesh import AXES
from parallel.process_group import rank
from tests.checkpoints import begin_training, do_step
from tests.ranks import REPOSITORY, run_ranks
from tests.test_layouts import ARCHS, LAYOUTS
from tests.tiny import FACTS, random_batch, tiny_arch, tiny_config
from training.dry_run import Needs
from training.run_folder import compose_run
from training.state import build_train_state

_ROWS, _PARTS = {"puzzle_emb_sharding": "rows"}, {"gradient_accumulation_steps": 2}
_AGAIN = {"activation_checkpointing": "block"}
_LAYOUTS = LAYOUTS | {"pp4": (4, {"pipeline_parallel_degree": 4})}
# Layout, model, and keys beside the layout's.
_RUNS = [
    ("dp2", "hrm", {}),
    ("fsdp2", "hrm", {"arch": {"forward_dtype": "float32"}}),
    ("fsdp2", "trm", _ROWS),
    ("pp2", "transformer", {"ema": None}),
    ("tp2", "serrm", {}),
    ("tp2", "fprm", _AGAIN),
    ("dp2 x pp2", "urm", _PARTS),
    ("fsdp2 x pp2", "trm", {"optimizer": "muon"}),
    ("dp2 x tp2", "hrm", {"optimizer": "adamw"}),
    ("tp2 x pp2", "urm", _PARTS | _AGAIN),
    ("pp4", "trm", {"arch": {"L_layers": 4}}),
    ("fsdp2 x tp2", "trm", {}),
]


def _count(runs: list[tuple[str, str, dict]]) -> list[tuple]:
    """Returns of each run what this rank keeps and sends in its second step, counted and computed."""
    found = []
    for layout, name, options in runs:
        arch = {**ARCHS[name], "forward_dtype": "bfloat16", **options.get("arch", {})}
        keys = {"ema": 0.9, "sync": "flat", **_LAYOUTS[layout][1], **options}
        arch = tiny_arch(name, **arch).model_dump()
        config = tiny_config(**{**keys, "arch": arch, "global_batch_size": 8})
        state = begin_training(config)
        with counting() as sent:
            do_step(state, config, random_batch(8))
        found.append((kept(state), dict(sent), *computed(config, FACTS)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_keep_and_send_what_the_formulas_say(size):
    """Memory as the sum over the ranks, to the byte; messages of blocks too, others beside small numbers."""
    runs = [run for run in _RUNS if _LAYOUTS[run[0]][0] == size]
    for run, *ranks in zip(runs, *run_ranks(_count, size, runs), strict=True):
        memories, sents, (memory, *_), (formulas, *_) = zip(*ranks, strict=True)
        for part in {*memory, *memories[0]}:
            total = sum(each[part] for each in memories)
            assert total == pytest.approx(size * memory.get(part, 0), rel=1e-12), f"{run}: {part}"
        for what, formula in formulas.items():
            most = max(each[what].bytes for each in sents)
            if what in ("stages", "sums of features"):
                assert max(each[what] for each in sents) == formula, f"{run}: {what}"
            elif what == "gradients of puzzle rows":
                assert most <= formula.bytes + 128, f"{run}: {what}"  # and counts
            else:
                assert formula.bytes <= most <= 1.1 * formula.bytes, f"{run}: {what}"
        assert {*formulas} == {*sents[0]} - {"metrics"}, run


def _most_drawn(layout: str) -> tuple[int, int, int]:
    """Returns how many weights this rank has at once while it draws the model; all of blocks; all others."""
    arch = tiny_arch("trm", L_layers=4)
    network = build_model(arch, FACTS).network.to("meta")
    blocks = sum(network.get_parameter(name).numel() for name in network.block_weights())
    draw, most = layers.truncated_normal, [0]

    def counted(*shape: int, std: float) -> torch.Tensor:
        alive = [each for each in gc.get_objects() if isinstance(each, nn.Parameter) and not each.is_meta]
        most.append(sum(each.numel() for each in alive) + math.prod(shape))
        return draw(*shape, std=std)

    layers.truncated_normal = counted
    config = tiny_config(arch=arch.model_dump(), seed=rank(), **LAYOUTS[layout][1])
    build_train_state(config, FACTS, device=torch.device("cpu")).check_replicas()
    return max(most), blocks, sum(each.numel() for each in network.parameters()) - blocks


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2 x pp2", "tp2"])
def test_no_rank_has_all_blocks_while_it_draws_them(layout):
    """Half of four blocks, and the one that it draws; and replicas are equal, whatever each has drawn."""
    for most, blocks, rest in run_ranks(_most_drawn, LAYOUTS[layout][0], layout):
        assert blocks / 2 < most <= rest + blocks * 3 / 4


_SIZES = {"27 M": (512, 4), "325 M": (1280, 8), "1 B": (2304, 8), "7 B": (4352, 16)}
_ALONE = dict.fromkeys(AXES, 1)
_MESHES = [_ALONE] + [
    _ALONE | mesh
    for mesh in (
        {"replicate": 8},
        {"shard": 8},
        {"pipeline": 8},
        {"tensor": 8},
        {"shard": 64},
        {"pipeline": 8, "shard": 8},
    )
]


def test_the_tables_of_the_docs_are_the_formulas():
    """HRM on Sudoku, 768 slots: of each size the row of memory, and of what 8 processes send."""
    page = (REPOSITORY / "docs" / "parallel.md").read_text()
    for size, (hidden, num_blocks) in _SIZES.items():
        arch = {"hidden_size": hidden, "num_heads": hidden // 64, "forward_dtype": "bfloat16"}
        arch |= {"H_layers": num_blocks, "L_layers": num_blocks, "puzzle_emb_ndim": hidden}
        arch = tiny_arch(q_target="exact", **arch).model_dump()
        config = tiny_config(arch=arch, global_batch_size=768, ema=0.999)
        metadata = dataclasses.replace(FACTS, seq_len=81, vocab_size=11, num_puzzle_identifiers=1)
        with torch.device("meta"):
            model = build_model(config.arch, metadata)
        needs = [Needs(config, model.network, mesh) for mesh in _MESHES]
        memory = [sum(each.memory().values()) for each in needs]
        sent = [sum(each.bytes for each in n.sent(model.reasoning, seq_len=81).values()) for n in needs[1:5]]
        for cells, meshes in ((memory, _MESHES), (sent, _MESHES[1:5])):
            fits = [num_blocks % mesh["pipeline"] == 0 for mesh in meshes]
            cells = [
                f"{float(f'{c / 1e9:.2g}'):g}" if fit else "-" for c, fit in zip(cells, fits, strict=True)
            ]
            row = f"| {size} | {' | '.join(cells)} |"
            assert row in page, row


_FITS = ("arch=trm", "arch.L_layers=2", "data_path=nowhere", "train_steps=10", "global_batch_size=64")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("7",), "global_batch_size 64 is not divisible by the 7 processes"),
        (
            ("4", "data_parallel_shard_degree=3"),
            "data_parallel_shard_degree=3 does not divide the 4 processes",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(words, line):
    with pytest.raises(ValueError, match=line):
        compose_run([*_FITS, "--cfg", "job", "--world-size", *words])


def test_a_cluster_that_is_not_at_hand_is_described(capsys, sudoku_folder):
    words = [*_FITS, "--cfg", "job", "--world-size", "64", "pipeline_parallel_degree=2", "ema=0.999"]
    assert compose_run(words) is None
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "64 processes (pipeline 2 x replicate 32), 1 slots each"
    assert lines[2] == "nowhere is not here, which knows better"
    assert {"weights", "masters", "moments", "averages", "stages"} <= {
        each.partition(" ")[0] for each in lines
    }
    assert lines[-1].startswith("10 steps, ")
    assert compose_run([*words, f"data_path={sudoku_folder}"]) is None
    assert "nowhere" not in capsys.readouterr().out
    with pytest.raises(ValueError, match="--world-size N is for"):
        compose_run(["--world-size", "64"])

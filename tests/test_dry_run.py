"""A dry run: docs have its formulas; what does not fit is one line. Bytes are counted in tests/system."""

import contextlib
import dataclasses

import pytest
import torch

from distributed.mesh import AXES
from distributed.number_format import choose_format
from models import build_model
from models.carry import Reasoning
from models.flops import StepCounter
from tests.ranks import REPOSITORY
from tests.tiny import FACTS, tiny_arch, tiny_config
from training.dry_run import Needs, describe
from training.layout import check_layout
from training.run_config import compose_run

_SIZES = {"27 M": (512, 4), "325 M": (1280, 8), "1 B": (2304, 8), "7 B": (4352, 16)}
_ALONE = dict.fromkeys(AXES, 1)
_MESHES = [_ALONE, *(_ALONE | {axis: 8} for axis in ("replicate", "shard", "pipeline", "tensor"))]
_MESHES += [_ALONE | {"shard": 64}, _ALONE | {"pipeline": 8, "shard": 8}]


@pytest.fixture
def counts_no_operations(monkeypatch) -> None:
    """Lets `StepCounter` count only calls of blocks, for what depends on nothing else."""
    monkeypatch.setattr("models.flops._count_blocks", lambda *_: 0.0)


@pytest.mark.slow
@pytest.mark.usefixtures("counts_no_operations")
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
        counter = StepCounter(model, seq_len=81)
        needs = [Needs(config, counter, mesh) for mesh in _MESHES]
        memory = [sum(each.memory().values()) for each in needs]
        sent = [sum(each.bytes for each in n.sent(model.reasoning).values()) for n in needs[1:5]]
        for cells, meshes in ((memory, _MESHES), (sent, _MESHES[1:5])):
            fits = [num_blocks % mesh["pipeline"] == 0 for mesh in meshes]
            texts = [f"{float(f'{cell / 1e9:.2g}'):g}" for cell in cells]
            texts = [text if fit else "-" for text, fit in zip(texts, fits, strict=True)]
            row = f"| {size} | {' | '.join(texts)} |"
            assert row in page, row


_FITS = ("arch=trm", "arch.L_layers=2", "data_path=nowhere", "train_steps=10", "global_batch_size=64")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("7", r"global_batch_size 64 is not divisible by the 7 processes\. Change one of them"),
        ("6 tensor_parallel_degree=2", "not divisible by the 3 processes that tensor parallelism leaves"),
        ("4 data_parallel_shard_degree=3", "data_parallel_shard_degree=3 does not divide the 4 proc"),
        ("4 gradient_accumulation_steps=5", "the 16 slots of each process are not divisible by gradient_"),
    ],
)
def test_what_does_not_fit_is_one_line(words, line):
    with pytest.raises(ValueError, match=line):
        compose_run([*_FITS, "--cfg", "job", "--world-size", *words.split()])


def test_a_rank_to_profile_that_does_not_exist_is_a_warning(capsys):
    check_layout(tiny_config(profile=True, profile_ranks=[1, 2, 3]), 2)
    warning = "warning: profile_ranks: the run has no rank 2, 3. The other ranks write their traces.\n"
    assert capsys.readouterr().err == warning


def test_an_elastic_run_continues_whatever_number_of_processes_remains(monkeypatch):
    """Of 24 slots, 2 processes have 12, and 5 processes have 5 or fewer: neither in 8 equal parts."""
    for is_elastic in (True, False):
        monkeypatch.setattr("training.layout.is_elastic", lambda is_elastic=is_elastic: is_elastic)
        for world_size in (2, 5):
            for options in ({}, {"local_steps": 2}):
                config = tiny_config(global_batch_size=24, gradient_accumulation_steps=8, **options)
                is_possible = is_elastic and not options
                with (
                    contextlib.nullcontext() if is_possible else pytest.raises(ValueError, match="divisible")
                ):
                    check_layout(config, world_size)


@pytest.mark.slow
def test_a_cluster_that_is_not_at_hand_is_described(capsys, sudoku_folder):
    words = [*_FITS, "--cfg", "job", "--world-size", "64", "pipeline_parallel_degree=2", "ema=0.999"]
    words += ["arch.forward_dtype=bfloat16"]
    assert compose_run(words) is None
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "64 processes (pipeline 2 x replicate 32), 1 slots each"
    assert lines[2] == "dataset not found: nowhere. Estimates assume puzzles of 900 tokens."
    names = {each.partition(" ")[0] for each in lines}
    assert {"weights", "masters", "moments", "averages", "stages"} <= names
    assert lines[-3].startswith("10 steps, ")
    assert any(line.startswith("estimate: about ") and " slots fit into a process" in line for line in lines)
    assumed = "The estimates assume arch.forward_dtype="
    assert lines[-1] == f"{assumed}bfloat16, because arch.forward_dtype is given."
    needed = "depends on the dataset. Build the dataset to see it, or set train_steps."
    assert compose_run([*words[:3], *words[4:]]) is None
    assert needed in capsys.readouterr().out
    assert compose_run([*words, f"data_path={sudoku_folder}"]) is None
    assert "nowhere" not in capsys.readouterr().out
    words = ["arch=ldt", f"data_path={sudoku_folder}", "--cfg", "job", "--world-size", "2"]
    assert compose_run(words) is None
    text = capsys.readouterr().out
    assert "averages" not in text
    name, reason = choose_format(torch.device("cpu"))
    assert text.endswith(f"\n{assumed}{name}, because {reason}.\n")
    layout = ["data_parallel_shard_degree=2", f"data_path={sudoku_folder}"]
    assert compose_run([*_FITS[:2], *layout], processes=2).data_parallel_shard_degree == 2
    with pytest.raises(ValueError, match="--world-size N is for"):
        compose_run(["--world-size", "64"])


def test_the_activations_of_a_network_without_levels_are_unknown(monkeypatch, sudoku_folder):
    count = StepCounter._count
    monkeypatch.setattr(
        StepCounter, "_count", lambda *args, **options: count(*args, **options)._replace(calls=[])
    )
    text = describe(tiny_config(data_path=[str(sudoku_folder)], global_batch_size=8), 2)
    assert "\nactivations are unknown and not included, because arch=hrm has no Level\n" in text
    assert "activations, about" not in text
    assert "\ntogether " in text


def _needs(**options) -> tuple[Needs, Reasoning]:
    """Returns what two processes of a tiny model need."""
    with torch.device("meta"):
        model = build_model(tiny_arch(), FACTS)
    counter = StepCounter(model, seq_len=FACTS.seq_len)
    return Needs(tiny_config(**options), counter, _ALONE | {"replicate": 2}), model.reasoning


@pytest.mark.usefixtures("counts_no_operations")
def test_the_slots_that_fit_fill_the_memory():
    (few, reasoning), (many, _) = (_needs(global_batch_size=size) for size in (8, 800))
    needed = sum(many.memory().values()) + many.activations(reasoning)
    assert few.slots_that_fit(needed + 1, reasoning) == many.slots == 400
    assert few.slots_that_fit(0, reasoning) == 0


@pytest.mark.usefixtures("counts_no_operations")
def test_local_steps_send_the_rows_of_several_steps_in_one_message():
    """In the long run as many rows a step: no row of several steps is left out."""
    needs = [_needs(global_batch_size=8, local_steps=steps) for steps in (1, 4)]
    often, seldom = (each.sent(reasoning)["gradients of puzzle rows"] for each, reasoning in needs)
    assert (seldom.bytes, seldom.messages) == (often.bytes, often.messages / 4)
    assert often.bytes > 0

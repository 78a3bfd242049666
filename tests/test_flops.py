"""The operations that a network says it takes, beside those that torch counts while it computes them."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

import evaluate
from checkpointing.finding import find_checkpoint
from config.architecture import architectures
from config.compose import compose_overrides, config_with
from config.programs import EvaluateConfig
from config.schema import PretrainConfig
from dataset.metadata import usual_metadata
from dataset.sets import PuzzleSet
from distributed.number_format import Choice
from models import build_model
from models.flops import StepCounter
from report.page_content import page_values
from report.run import read_run
from tests.ranks import REPOSITORY
from tests.report_runs import write_run
from tests.tiny import FACTS, draws_of, random_batch, run_losses, tiny_arch, tiny_model
from training.data import build_plan
from training.schedule import Schedule


def _fused_flops(q: tuple, k: tuple, v: tuple, *_: object, **__: object) -> int:
    return sdpa_flop_count(q, k, v)


# Torch does not count this kernel.
_FUSED = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _fused_flops}
_CONV = {"pos_encodings": "none", "puzzle_emb_ndim": 0, "puzzle_emb_len": 0, "conv": "instead"}
_CASES = [  # beside every model: targets, calls with and without gradient, convolutions, other sizes
    *((name, {}) for name in architectures()),
    *(("hrm", {"q_target": "exact"}), ("hrm", {"no_ACT_continue": True})),
    ("trm", {"gradient_cycles": 2, "L_cycles": 3, "H_cycles": 3, "mlp_t": True, "pos_encodings": "none"}),
    *(("trm", _CONV), ("trm", {"is_frozen": True, "conv": "beside"})),
    ("serrm", {"equivariant_symbols": False}),
    ("fprm", {"conv_type": "conv1d", "puzzle_emb_ndim": 0}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "changes"), _CASES)
def test_a_step_takes_what_torch_counts(name, changes):
    """Training, with one of the slots in its last step, which a deferred target needs, and evaluation."""
    trained = {key: value for key, value in changes.items() if key != "is_frozen"}
    model, batch, size = tiny_model(name, **trained), random_batch(4), 4
    model.requires_grad_("is_frozen" not in changes)
    assert model.reasoning.max_steps in (1, size)
    carry = model.initial_carry(batch)._replace(steps=torch.arange(size), halted=torch.zeros(size).bool())
    rng = draws_of(size)
    with FlopCounterMode(display=False, custom_mapping=_FUSED) as counted:
        output, losses = run_losses(model, carry, batch, rng=rng, halting="max")
        losses()[0].backward()
    trains = counted.get_total_flops()
    with FlopCounterMode(display=False, custom_mapping=_FUSED) as counted, torch.no_grad():
        run_losses(model.eval(), carry, batch, rng=rng)
    answers = counted.get_total_flops()
    with torch.device("meta"):
        whole = build_model(tiny_arch(name, **trained), FACTS).requires_grad_("is_frozen" not in changes)
    counter = StepCounter(whole, seq_len=FACTS.seq_len)
    hidden_size, q_target = model.network.arch.hidden_size, trained.get("q_target")
    if name == "hrm" and (q_target or "deferred") == "deferred" and not trained.get("no_ACT_continue"):
        trains -= size * 8 * hidden_size  # the Q head reads the earlier state too, which is not counted
    if name == "fprm":
        # Torch counts the gradient of a grouped convolution's weight as that of a full convolution.
        of_call = 2 * model.network.L_level.conv.weight.numel() * FACTS.seq_len
        trains -= size * model.reasoning.L_cycles * (hidden_size - 1) * of_call
    assert size * counter.flops(model.reasoning, trains=True) == trains
    assert size * counter.flops(model.eval_reasoning("max")) == answers


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"samples": 2, "retry_samples": 4}])
def test_an_answer_takes_what_torch_counts(sudoku_folder, tmp_path, monkeypatch, capsys, options):
    """A search that decides no puzzle, so that every chain runs to its end, also in the second pass."""
    options_of_search = {"kill_threshold": 0.0, "eval_conflict_threshold": 1.0}
    arch = tiny_arch("ldt", loops=1, num_layers=1, pos_encodings="rope", **options_of_search)
    run, counts = write_run(tmp_path / "run", sudoku_folder, arch=arch.model_dump()), []

    def counted_split(*arguments, **named):
        with FlopCounterMode(display=False, custom_mapping=_FUSED) as counted:
            found = split(*arguments, **named)
        counts.append(counted.get_total_flops())
        return found

    split = evaluate.evaluate_split
    monkeypatch.setattr(evaluate, "evaluate_split", counted_split)
    monkeypatch.setattr(evaluate, "compiles_on_all_ranks", lambda *_, **__: False)
    out, halts = tmp_path / "out", {"halt_max_steps": 2, "loops": 3, "eval_batch_size": 400}
    config = config_with(EvaluateConfig, checkpoint=str(run), output_dir=str(out), **halts, **options)
    number_format = Choice("float32", "as the test says")
    metrics = evaluate.evaluate_checkpoint(config, find_checkpoint(run), number_format, torch.device("cpu"))
    metrics = metrics["all"]
    assert metrics["undecided"] == 1, "or this proves little"
    calls = metrics["calls@steps=2,samples=2"] if "samples" in options else metrics["steps"]
    assert calls == 2 * options.get("retry_samples", 1)
    gigaflops = counts[0] / 1e9 / metrics["count"]
    assert metrics["gigaflops_per_step"] * calls == pytest.approx(gigaflops)
    highlights = page_values(read_run(run, evaluation=out), None)["highlights"]
    assert {name: value for name, value, _ in highlights}["GFLOP per answer"] == f"{gigaflops:.3g}"
    if "samples" in options:
        row = ["2", "2", "8", f"{gigaflops:.4g}", "0.0000", "0.0000", "1.0000"]
        assert row in [line.split() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.long
@pytest.mark.slow
def test_what_the_page_of_the_field_says_of_recipes():
    """The rows of "What computing buys": updates x slots x GFLOP, the PF of them, and the GFLOP of a step."""
    text = (REPOSITORY / "docs/field.md").read_text().replace(",", "")
    count = r"\| ([\d.]+) "
    row = rf"^\| `([^`]+)`(?: \((\d*)[^|]*)? \| (\d+) x (\d+) x ([\d.]+).* {count}{count}\|$"
    rows = re.findall(row, text, re.MULTILINE)
    assert len(rows) > 10
    for words, puzzles, *figures in rows:
        words_of_run = [f"experiment={words.split()[0]}", *words.split()[1:], "arch.forward_dtype=float32"]
        config = compose_overrides(PretrainConfig, words_of_run)
        cells, vocab = (900, 6) if "maze" in words else (81, 11)
        indices = np.arange(int(puzzles or 1000) + 1)
        puzzle_set = PuzzleSet(indices, indices, indices, indices, indices)
        data = SimpleNamespace(splits={"train": SimpleNamespace(sets={"all": puzzle_set})})
        schedule = Schedule(config, build_plan(config, data))
        metadata = usual_metadata(vocab_size=vocab, seq_len=cells, num_puzzle_identifiers=1)
        with torch.device("meta"):
            model = build_model(config.arch, metadata)
        updates, slots = schedule.total_steps, config.global_batch_size
        counter = StepCounter(model, seq_len=cells)
        petaflops = schedule.petaflops(updates, counter)
        step = counter.flops(model.eval_reasoning("max"))
        counted = [updates, slots, 1e6 * petaflops / updates / slots, petaflops, step / 1e9]
        assert [*map(float, figures)] == pytest.approx(counted, rel=5e-3), words


def test_a_forward_that_reads_values_of_tensors_is_named_in_one_line(monkeypatch):
    """Networks of plugins do, and the meta device has no values."""
    model = tiny_model()
    forward = model.network.forward

    def reading(state, inputs, *arguments, **options):
        assert int(inputs[0, 0]) >= 0
        return forward(state, inputs, *arguments, **options)

    monkeypatch.setattr(model.network, "forward", reading)
    with pytest.raises(
        ValueError, match=r"^test_flops.py, line \d+: HRM cannot run on the meta device"
    ) as caught:
        StepCounter(model, seq_len=FACTS.seq_len).flops(model.reasoning)
    assert "\n" not in str(caught.value)

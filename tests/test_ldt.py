"""LDT: what a search may not know, how boards enter, and a run from its data to a solved puzzle."""

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from checkpointing.finding import find_checkpoint
from config.compose import config_with
from config.files import load_defaults
from config.programs import EvaluateConfig, SolveConfig
from config.schema import validate_config
from dataset.build import build_dataset
from dataset.description import with_candidates
from dataset.files import open_dataset
from dataset.kinds.kind import Puzzle, find_kind
from dataset.loader import Batch, read_rows
from dataset.metadata import IGNORE_LABEL_ID, Dataset
from evaluation import results, solving
from evaluation.loop import answer_batches
from evaluation.passes import evaluate_split
from evaluation.test_time import build_draw, set_up
from models import HaltingModel, build_model
from models.lattice import CONTRADICTORY, RESET, Outputs, is_lost, move
from models.random import SlotRng
from report.trace import picture_data, reliability, trace_puzzles
from share import keep
from tests.golden.ldt import translate
from tests.pairs_source import random_pairs, write_json
from tests.ranks import NUM_THREADS, complete_program
from tests.report_runs import searching_model
from tests.sudoku_source import build_sets
from tests.tiny import draws_of, tiny_arch, tiny_model
from training import initial

_BLANK, _DIGITS = 1, np.arange(2, 6)


@pytest.fixture(scope="module")
def data(sudoku_folder) -> Dataset:
    return with_candidates(open_dataset(sudoku_folder, read_everything=False))


def _batch(inputs: np.ndarray, labels: np.ndarray) -> Batch:
    tokens = (torch.from_numpy(each.astype(np.int32)) for each in (inputs, labels))
    rows = torch.arange(len(inputs))
    return Batch(*tokens, torch.zeros_like(rows).int(), rows)


class _Renamed:
    """Draws in which every number for a value is its new name's."""

    def __init__(self, rng: SlotRng, old_values: torch.Tensor):
        self._draws, self._old_values, self.integers = rng, old_values, rng.integers
        self.arrays = rng.arrays

    def uniform(self, shape, *, use):
        drawn = self._draws.uniform(shape, use=use)
        return drawn[:, self._old_values] if use.endswith(("values", "value")) else drawn


def _search(model: HaltingModel, batch: Batch, old_values: torch.Tensor | None = None) -> dict[int, tuple]:
    """Searches by one chain; returns of each row its answer, the round, and whether it is one."""
    reasoning = model.eval_reasoning("act")
    draw, found = build_draw(model.network, reasoning, seed=1), {}
    renamed = draw if old_values is None else lambda carry: _Renamed(draw(carry), old_values)
    options = {"draw": renamed, "on_step": lambda *_: None}
    with torch.inference_mode():
        for final in answer_batches(model, iter([batch]), reasoning, **options):
            columns = final.prediction.logits.argmax(-1), final.carry.steps, final.prediction.q_halt > 0
            columns = (each.tolist() for each in (final.carry.data.rows, *columns))
            found |= {row: tuple(each) for row, *each in zip(*columns, strict=True)}
    assert len({each[1:] for each in found.values()}) > 3, "or this proves little"
    return found


@pytest.mark.slow
def test_grids_smaller_than_their_field_are_not_lost(tmp_path):
    """The padding beside them has no label. Inputs and outputs have different sizes."""
    source = write_json(tmp_path / "pairs.jsonl", random_pairs(100))
    build_dataset("pairs", ["--source", str(source), "--output-dir", str(tmp_path / "data")])
    data = with_candidates(open_dataset(tmp_path / "data", read_everything=False))
    network = build_model(tiny_arch(name="ldt"), data.metadata).network
    batch = read_rows(data, "all", np.arange(10))
    board = network.start(batch, None, None, batch.is_real)
    assert (batch.labels == IGNORE_LABEL_ID).any(-1).sum() > 1
    assert not is_lost(board).any()


def test_a_search_uses_no_label_and_no_rule(data):
    """Noise in place of labels changes no answer; renamed symbols change but the names in it."""
    model, puzzles = searching_model(data), data.splits["test"].sets["all"]
    inputs, labels = np.asarray(puzzles.inputs), np.asarray(puzzles.labels)
    known = _search(model, _batch(inputs, labels))
    noise = np.random.default_rng(0).integers(0, 6, labels.shape)
    assert _search(model, _batch(inputs, noise)) == known
    new = np.array([0, _BLANK, 4, 2, 5, 3])  # of each token
    old_values = torch.from_numpy(new.argsort()[2:] - 2)
    renamed = _search(model, _batch(new[inputs], new[labels]), old_values)
    assert renamed == {row: (new[tokens].tolist(), *rest) for row, (tokens, *rest) in known.items()}


def test_what_a_token_may_become_is_found_in_the_training_data_and_kept_with_the_weights(data, tmp_path):
    words = ("--size", "5", "--generate", "20", "--num-test", "2")
    build_dataset("maze", ["--output-dir", str(tmp_path), *words])
    mazes = with_candidates(open_dataset(tmp_path, read_everything=False))
    sudoku_pairs = [*((1, digit) for digit in _DIGITS), *zip(_DIGITS, _DIGITS, strict=True)]
    maze_pairs = [(1, 1), (2, 2), (2, 5), (3, 3), (4, 4)]
    for each, pairs, may_permute in ((data, sudoku_pairs, True), (mazes, maze_pairs, False)):
        found, network = each.metadata, searching_model(each).network
        assert [divmod(pair, found.vocab_size) for pair in found.candidates] == pairs
        assert (found.may_turn, found.may_permute) == (True, may_permute)
        assert network.values.tolist() == sorted({value for _, value in pairs})
        bare = dataclasses.replace(found, candidates=None, may_turn=None, may_permute=None)
        assert network.complete(bare, network.state_dict()) == found


def test_a_run_that_begins_with_a_checkpoint_keeps_the_facts_of_its_own_data(data, monkeypatch):
    network = searching_model(data).network
    stored = {name: each + 1 for name, each in network.state_dict().items()}
    facts = {name: getattr(network, name).clone() for name in ("candidates", "symmetries")}
    monkeypatch.setattr(initial, "find_checkpoint", lambda _: "a checkpoint")
    monkeypatch.setattr(initial, "load_weights", lambda _: stored)
    initial.copy_weights_(network.state_dict(), "", network.arch)
    for name, each in network.state_dict().items():
        assert torch.equal(each, facts.get(name, stored[name])), name


def test_boards_enter_with_hints_and_some_of_these_are_wrong(data):
    model, puzzles = searching_model(data).train(), data.splits["train"].sets["all"]
    inputs, labels = (np.tile(each, (20, 1)) for each in (puzzles.inputs, puzzles.labels))
    batch, every = _batch(inputs, labels), torch.ones(len(inputs)).bool()
    state = model.network.start(batch, model.reasoning, draws_of(len(inputs)), every)
    entered, solution = state["entered"], F.one_hot(batch.labels.long() - 2, 4)
    is_given, is_right = entered.sum(-1) == 1, (entered & solution).sum(-1) == 1
    assert is_given[batch.inputs != _BLANK].all()
    is_wrong = ~is_right.all(-1)
    assert is_wrong.float().mean() == pytest.approx(0.25, abs=0.03)
    assert torch.equal(state["target"].any(-1).all(-1), ~is_wrong)
    share = (is_given & (batch.inputs == _BLANK)).sum(-1) / (batch.inputs == _BLANK).sum(-1)
    assert (share == 0).float().mean() == pytest.approx(0.2 + 0.55 / 10, abs=0.04)
    assert (is_given & ~is_right)[is_wrong].sum(-1).min() >= 1
    assert (is_given & ~is_right)[is_wrong].sum(-1).float().mean() < 2


def test_true_pins_are_the_label_and_fall_along_the_run(data):
    model = searching_model(data, true_pin_prob=1.0, kill_threshold=0.0).train()
    puzzles = data.splits["train"].sets["all"]
    batch = _batch(np.asarray(puzzles.inputs), np.asarray(puzzles.labels))
    rng = draws_of(len(batch.rows))
    network, shares = model.network, []
    state = network.start(batch, model.reasoning, None, torch.ones(len(batch.rows)).bool())
    last = network.look(state["alive"], rng, loops=2).last()
    last = last._replace(conflict=torch.full_like(last.conflict, -9.0))
    for progress in (0.0, 0.5, 1.0):
        reasoning = dataclasses.replace(model.reasoning, progress=progress)
        moved = move(state, last, network.arch, reasoning, rng)["alive"]
        shares.append(float(((moved & state["target"]).sum(-1) == 1).all(-1).float().mean()))
    assert shares[0] == 1 > shares[1] > shares[2] > 0


def test_rotary_pairs_of_the_public_code_are_read():
    """There pairs are side by side, and each of q, k and v is a matrix of its own."""
    network = tiny_model("ldt", pos_encodings="rope", hidden_size=16, num_heads=2).network
    attn, width, heads, half = network.blocks.layers[0].attn, 16, 2, 4
    torch.manual_seed(1)
    public = {f"{p}_proj.{k}": torch.randn(width, width)[:, : width if k == "weight" else 1].squeeze(1)
              for p in ("q", "k", "v", "out") for k in ("weight", "bias")}  # fmt: skip
    prefix = "backbone.layers.0.attn."
    stored = translate({prefix + name: each for name, each in public.items()}, num_heads=heads)
    attn.load_state_dict({name.removeprefix("blocks.layers.0.attn."): each for name, each in stored.items()})
    x = torch.randn(3, 17, width)
    q, k, v = (F.linear(x, public[f"{p}_proj.weight"], public[f"{p}_proj.bias"]) for p in "qkv")
    place = torch.arange(16)
    f = 10000.0 ** (-2 * torch.arange(half // 2) / half)
    angles = F.pad(torch.cat([torch.outer(line, f) for line in (place // 4, place % 4)], 1), (0, 0, 0, 1))
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]

    def turned(z):
        pairs = torch.view_as_complex(z.unflatten(-1, (heads, half, 2)))
        return torch.view_as_real(pairs * turns).flatten(-2)

    q, k, v = (each.transpose(1, 2) for each in (turned(q), turned(k), v.unflatten(-1, (heads, -1))))
    mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    expected = F.linear(mixed, public["out_proj.weight"], public["out_proj.bias"])
    torch.testing.assert_close(attn(x, network.rotary), expected, atol=1e-4, rtol=1e-4)


def test_matrices_begin_as_those_of_pytorch():
    """The paper's code leaves them at that: uniform, of q, k and v together by Xavier's rule."""
    network = tiny_model("ldt", hidden_size=64, num_heads=2).network
    attn = network.blocks.layers[0].attn
    for layer, bound in ((attn.qkv_proj, (6 / 256) ** 0.5), (attn.o_proj, 1 / 8), (network.keep_head, 1 / 8)):
        assert layer.weight.abs().max().item() == pytest.approx(bound, rel=0.03)
    assert not attn.o_proj.bias.any()


def test_guesses_are_for_a_search_and_noise_is_not():
    asked = load_defaults("evaluate") | {"checkpoint": "run", "samples": [4]}
    for name, key, value in (("trm", "decision_cell", "fewest"), ("trm", "loops", 3), ("ldt", "noise", 0.3)):
        with pytest.raises(ValueError, match=f"^{key} is for models that"):
            set_up(tiny_model(name), validate_config(EvaluateConfig, asked | {key: value}))
    for name, key, words in (("trm", [1], "for models that search"), ("ldt", [1, 2], "not a list"),
                             ("ldt", [8], "retry_samples=8 must be larger than samples=8")):  # fmt: skip
        options = asked | {"samples": key, "retry_samples": 8}
        with pytest.raises(ValueError, match=words):
            set_up(tiny_model(name), validate_config(EvaluateConfig, options))
    chosen = {"loops": 3, "decision_cell": "fewest", "decision_value": "best", "eval_conflict_threshold": 0.9}
    reasoning, _ = set_up(tiny_model("ldt"), validate_config(EvaluateConfig, asked | chosen))
    assert {name: getattr(reasoning, name) for name in chosen} == chosen
    assert set(chosen) < set(results._OPTIONS)  # they belong to the identity of a result


def test_a_search_gives_up_above_its_threshold(data):
    model = searching_model(data)
    batch, fresh = read_rows(data, "all", np.arange(8)), torch.ones(8, dtype=torch.bool)
    for threshold in (0.0, 1.0):
        reasoning = dataclasses.replace(model.eval_reasoning("max"), eval_conflict_threshold=threshold)
        state = model.network.start(batch, reasoning, None, fresh)
        last = model.network.look(state["alive"], draws_of(8), loops=1).last()
        last = last._replace(keep=torch.full_like(last.keep, 9.0))  # strikes out nothing
        moved = move(state, last, model.network.arch, reasoning, draws_of(8), in_search=True)
        assert (moved["outcome"] == CONTRADICTORY).all() == (threshold == 0)


@pytest.mark.slow
def test_a_search_may_draw_although_training_guesses_the_best(data):
    """decision_value of evaluate.py changes only the search. Temperature 0 guesses the best in both."""
    asked, num = load_defaults("evaluate") | {"checkpoint": "run", "samples": [4]}, 64
    batch, fresh = read_rows(data, "all", np.arange(num)), torch.ones(num, dtype=torch.bool)
    digit, found = torch.randn(num, 16, 4, generator=torch.Generator().manual_seed(0)), {}
    last = Outputs(torch.full_like(digit, 9.0), digit, torch.full((num,), -9.0))  # a move removes nothing
    for trained, asks in itertools.product(("best", "drawn", "temperature 0"), (None, "best", "drawn")):
        changes = {"temperature": 0.0} if trained == "temperature 0" else {"decision_value": trained}
        model = searching_model(data, **changes)
        config = validate_config(EvaluateConfig, asked | {"decision_value": asks})
        in_search, settings = set_up(model, config)

        def guesses_best(reasoning, *, in_search, model=model) -> bool:
            state = model.network.start(batch, reasoning, None, fresh)
            moved = move(state, last, model.network.arch, reasoning, draws_of(num), in_search=in_search)
            cells = (torch.arange(num), moved["guess"].long())
            assert (moved["alive"][cells].sum(-1) == 1).all()
            return torch.equal(moved["alive"][cells].argmax(-1), digit[cells].argmax(-1))

        assert guesses_best(model.reasoning, in_search=False) == (trained != "drawn")
        searches_best = trained == "temperature 0" or (asks or trained) == "best"
        assert guesses_best(in_search, in_search=True) == searches_best
        options = {"reasoning": in_search, "settings": settings, "puzzles": {"all": np.arange(8)}}
        result = evaluate_split(model, data, global_batch_size=64, outputs=("preds",), **options)["all"]
        answers = found.setdefault(searches_best, result.outputs["preds"])
        np.testing.assert_array_equal(result.outputs["preds"], answers)
    assert (found[True] != found[False]).any()


def test_a_report_has_the_boards_of_a_search(data):
    traced = trace_puzzles(searching_model(data), data, num_puzzles=50, batch_size=8, path=Path("step_1"))
    content = picture_data(traced)
    assert content["is_search"]
    assert len(content["puzzles"]) == 40, "a search takes long"
    assert reliability(traced) is None
    guesses = np.array([puzzle["guesses"] for puzzle in content["puzzles"]])
    assert {RESET} < set(guesses[guesses < 0])
    assert (guesses >= 0).any()
    for puzzle in content["puzzles"]:
        boards, answers = (np.array(puzzle[name]) for name in ("candidates", "answers"))
        is_one = boards & (boards - 1) == 0
        assert (boards[is_one] == 1 << answers[is_one]).all()
        assert puzzle["rated"] == np.rint(100 * is_one.mean(axis=1)).tolist()
        entered = np.array([1 << token if token > 1 else 0b111100 for token in puzzle["input"]])
        for step, guess in enumerate(puzzle["guesses"]):
            before = boards[step - 1] if step else entered
            assert (boards[step] == entered if guess == RESET else boards[step] & ~before == 0).all()
            assert guess < 0 or is_one[step][guess] and before[guess] & (before[guess] - 1)


def test_a_report_of_many_tokens_is_also_that_of_a_search(data, monkeypatch):
    """A mask of candidates has too few bits. LDT has no Q head, so there is no calibration."""
    monkeypatch.setattr("evaluation.trace.MOST_TOKENS", 3)
    traced = trace_puzzles(searching_model(data), data, num_puzzles=50, batch_size=8, path=Path("step_1"))
    assert reliability(traced) is None
    content = picture_data(traced)
    assert (content["is_search"], content["has_candidates"]) == (True, False)
    for puzzle in content["puzzles"]:
        solved = [100 * (not puzzle["is_undecided"] and step >= puzzle["halts_at"]) for step in range(1, 21)]
        assert puzzle["rated"] == solved
    assert {puzzle["is_undecided"] for puzzle in content["puzzles"]} == {False, True}


def test_a_search_starts_with_few_samples_and_the_first_to_halt_answers(data, monkeypatch):
    """Sample 9 halts after its step 2. It starts after 3 steps, and 8 samples run before."""
    model, started = searching_model(data).eval(), []
    monkeypatch.setattr(solving, "_WIDEN_STEPS", 3)

    def wants_to_halt(state, _prediction, _rng=None):
        return state["is_it"] & (state["age"] == 2)

    def start(batch, *_):
        started.append(len(batch.rows))
        return own_start(batch, *_) | {"is_it": batch.rows == 9, "age": torch.zeros_like(batch.rows)}

    def forward(state, *arguments, **options):
        own = {name: each for name, each in state.items() if name not in ("is_it", "age")}
        after, prediction = own_forward(own, *arguments, **options)
        return after | {"is_it": state["is_it"], "age": state["age"] + 1}, prediction

    network, own_start, own_forward = model.network, model.network.start, model.network.forward
    for name, function in (("wants_to_halt", wants_to_halt), ("start", start), ("forward", forward)):
        monkeypatch.setattr(network, name, function)
    tokens = np.array(data.splits["test"].sets["all"].inputs[0])
    config = config_with(SolveConfig, samples=32, steps=20)
    options = {"style": find_kind("sudoku").style, "identifier": 0, "device": torch.device("cpu")}
    answer = solving.answer_puzzle(model, Puzzle(tokens, 6), config, **options)
    assert (answer.sample, answer.number, answer.is_decided) == (9, 2, True)
    assert started == [8, 8, 8, 8], "twice each: blank, and filled"
    few = config_with(SolveConfig, samples=32, steps=1)
    answer = solving.answer_puzzle(model, Puzzle(tokens, 6), few, **options)
    assert (answer.sample, answer.is_decided, sum(started[4:]) // 2) == (0, False, 32), "all of them ran"


@pytest.mark.long
@pytest.mark.slow
def test_a_run_learns_searches_and_solves(tmp_path):
    """On one process; that several are the same run is in `test_network_of_candidates`."""
    build_sets("sudoku", tmp_path / "data", "--generate", 200, "--num-test", 40, "--box", "2x2")
    assert_learns_searches_and_solves(tmp_path, tmp_path / "data", "sudoku_extreme_search", epochs=32)


def assert_learns_searches_and_solves(folder: Path, data: Path, experiment: str, *, epochs: int = 48) -> None:
    small = ("arch.hidden_size=32", "arch.num_heads=2", "arch.num_layers=2", "arch.loops=2", "lr=1e-2")
    small += ("global_batch_size=32", f"epochs={epochs}", "lr_warmup_steps=20", "device=cpu", "compile=false")
    small += ("arch.halt_max_steps=30", "arch.eval_halt_max_steps=30", "wandb_mode=disabled", "ema=0.95")
    small += ("arch.forward_dtype=float32",)
    words = (f"experiment={experiment}", *small, f"cpu_threads={NUM_THREADS}", f"data_path={data}")
    complete_program("pretrain", *words, "checkpoint_path=run", folder=folder)
    machine = ("checkpoint=run", "device=cpu", f"cpu_threads={NUM_THREADS}")
    words = ("samples=[1,8]", "halt_max_steps=30", "decision_value=best", "evaluators=[sudoku]")
    finished = complete_program("evaluate", *machine, *words, "output_dir=out", folder=folder)
    assert "wrong        undecided" in finished.stdout
    metrics = json.loads((folder / "out" / "metrics.json").read_text())["all"]
    assert metrics["exact_accuracy"] + metrics["wrong"] + metrics["undecided"] == pytest.approx(1)
    assert metrics["exact_accuracy"] == metrics["sudoku/valid_accuracy"] > 0.2
    checkpoint, test = find_checkpoint(folder / "run"), open_dataset(data, read_everything=False)
    hasty = checkpoint.arch.model_copy(update={"eval_halt_max_steps": 2})
    count = test.splits["test"].sets["all"].num_examples
    checkpoint = dataclasses.replace(checkpoint, arch=hasty)
    found = keep.answer(checkpoint, test, torch.float32, "float32", count=count)
    assert all((tokens != _BLANK).all() for tokens in found.values()), "what is open is no answer"
    assert len(found) < count
    puzzle = "puzzle=1..4 .... .... 4..1"
    finished = complete_program("solve", *machine, puzzle, "samples=8", "steps=30", folder=folder)
    assert "valid: " in finished.stdout or "not decided: " in finished.stdout

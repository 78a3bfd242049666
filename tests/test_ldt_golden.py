"""LDT against its public trainer and solver: GOLDEN_3_DIR/ldt_*, whose README says what each array is."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from checkpointing.published import translate_weights
from config.architecture import LDTConfig
from config.files import load_defaults
from config.schema import validate_config
from dataset.format import usual_metadata
from dataset.loader import Batch
from models import HaltingModel, build_model
from models.carry import Carry
from optimizers.weights import build_weights
from parallel.collectives import all_ranks
from parallel.flat import FlatParameters
from tests.golden import compare, expected
from tests.ranks import REPOSITORY

_FOLDER = Path(os.environ.get("GOLDEN_3_DIR", REPOSITORY.parent / "shared" / "golden_3"))
_RUNS = sorted(path.parent for path in _FOLDER.glob("ldt_*/expected.json"))
pytestmark = pytest.mark.skipif(not _RUNS, reason=f"{_FOLDER} has no golden vectors of LDT (GOLDEN_3_DIR)")
_OUTPUTS, _WEIGHTS = 5e-5, 5e-5


class _Recorded:
    """Draws that give what was recorded: symmetries and orders of values of passes, cells and values."""

    def __init__(self, **symmetries):
        self._given = symmetries
        self.counters = next(iter(symmetries.values()))

    def integers(self, shape, *, below, use):
        return self._given[use]

    def uniform(self, shape, *, use):
        if use.endswith("values"):  # that sort as recorded
            return self._given[use].argsort(-1) / 1e3
        chosen = self._given[use].clamp(min=0)
        return torch.full((len(chosen), *shape), 0.5).scatter(1, chosen[:, None], 1.0)


def _draws(arrays, number: int, *uses: tuple[str, str]) -> _Recorded:
    """Reads the draws of an update. uses: ours, and the prefix of the arrays."""
    given = {}
    for use, prefix in uses:
        given[f"{use} symmetry"] = torch.from_numpy(arrays[f"{prefix}_symmetry_{number}"])
        given[f"{use} values"] = torch.from_numpy(arrays[f"{prefix}_digits_{number}"])
    given["cell"], given["value"] = (
        torch.from_numpy(arrays[f"{name}_canonical_{number}"]) for name in ("cell", "digit")
    )
    return _Recorded(**given)


def _load(run: Path, weights: str, **changes) -> HaltingModel:
    known = expected(run)
    public, operator, loss = known["arch"], known["operator"], known["loss"]
    values = {"hidden_size": public["dim"], "num_heads": public["n_heads"], "loops": public["n_loops"]}
    values |= {"num_layers": public["num_layers"], "expansion": public["ffn_mult"], "dropout": 0.0}
    values |= {"pos_encodings": "rope" if public["use_rope"] else "learned", "forward_dtype": "float32"}
    values |= {"rope_theta": public["rope_base"], "kill_threshold": operator["threshold"]}
    values |= {name: operator[name] for name in ("conflict_threshold", "temperature")}
    values |= {"halt_max_steps": operator["max_age"] + 1, "kill_weight": loss["eliminate_weight"]}
    values |= {f"{name}_weight": loss[f"{name}_weight"] for name in ("keep", "digit", "conflict")}
    arch = validate_config(LDTConfig, load_defaults("arch/ldt") | values | changes)
    num_values, is_sudoku = public["n_channels"], known["task"] == "sudoku"
    size = num_values + (2 if is_sudoku else 1)  # padding and, in a Sudoku, a blank are no values
    metadata = usual_metadata(
        vocab_size=size,
        seq_len=public["seq_len"],
        num_puzzle_identifiers=1,
        candidates=tuple(token * size + token for token in range(size - num_values, size)),
        symmetries="sudoku" if operator["permute_digits"] else "square",
        symbols=None,
    )
    model = build_model(arch, metadata)
    stored = translate_weights(torch.load(run / weights, weights_only=True), arch)
    buffers = {name: getattr(model.network, name) for name in ("candidates", "symmetries")}
    model.network.load_state_dict(stored | buffers)
    return model


def _carry(state: dict[str, torch.Tensor], steps: torch.Tensor) -> Carry:
    nothing = torch.zeros(len(steps), state["alive"].shape[1], dtype=torch.int32)
    data = Batch(nothing, nothing, nothing[:, 0], torch.arange(len(steps)))
    return Carry(state, steps, torch.zeros_like(steps, dtype=torch.bool), data)


def _in_frame(entries: torch.Tensor, index: torch.Tensor) -> np.ndarray:
    """Outputs of a board as the pass has seen them."""
    return entries.detach().flatten(-2).gather(-1, index.expand(*entries.shape[:-2], -1)).view(entries.shape)


@pytest.mark.parametrize("run", _RUNS, ids=lambda run: run.name)
def test_training_is_replayed(run):
    """Losses, gradients, the pool of boards after every update, and the last weights."""
    known = expected(run)
    if known["n_solutions"] > 1:
        pytest.skip("boards with several solutions are not built")
    model, options = _load(run, "step_0"), known["optimizer"]
    network, reasoning = model.network, model.reasoning
    chosen = SimpleNamespace(optimizer="adamw", optimizer_sharding="none", **options)
    flat = FlatParameters(network.named_parameters(), ranks=all_ranks())
    flat.attach_gradients()
    weights = build_weights(chosen, flat, matrices=())
    boards, draws, pool = (np.load(run / f"{name}.npz") for name in ("boards", "draws", "pool"))
    size, next_board = known["pool_size"], known["pool_size"]
    fresh, solutions = (torch.from_numpy(boards[f"fresh_{name}"]) for name in ("x", "solutions"))
    solutions = solutions[:, 0]
    state = {"alive": fresh[:size], "entered": fresh[:size], "target": solutions[:size]}
    state = {name: each.clone() for name, each in state.items()}
    state["outcome"] = torch.zeros(size, dtype=torch.uint8)
    ages = torch.zeros(size, dtype=torch.int32)
    for number, golden in enumerate(known["train"]):
        rows = torch.from_numpy(draws[f"rows_{number}"])
        of_step = _draws(draws, number, ("look", "loss"), ("move", "step"))
        before = _carry({name: each[rows] for name, each in state.items()}, ages[rows])
        output = model.train()(before, reasoning, of_step)
        counts = {"slots": len(rows), **network.counts(before)}
        flat.gradients.zero_()
        loss, sums = network.losses(before, output, counts=counts, reasoning=reasoning)
        (loss / len(rows)).backward()
        where = f"{run.name}, step {golden['step']}"
        found = {"loss": loss.detach() / len(rows), "grad_norm": flat.gradients.norm()}
        divisors = {"keep": len(rows), "digit": max(golden["digit_cells"], 1), "conflict": len(rows)}
        found |= {name: sums[f"{name}_loss"] / by for name, by in divisors.items()}
        for name, value in found.items():
            key = {"keep": "bce_loss"}.get(name, f"{name}_loss" if name in divisors else name)
            relative = 5e-4 if name == "grad_norm" else 1e-4
            compare(float(value), golden[key], relative=relative, absolute=1e-6, what=f"{where}: {name}")
        assert int(counts["digit_cells"]) == golden["digit_cells"], where
        if number == 0:
            _assert_outputs(network, run, output, of_step)
        weights.clip_(options["clip_norm"])
        weights.update_(golden["lr"], step=number + 1)

        after, moves = model.eval().network.advance(output.carry, reasoning, of_step)
        solved, conflict = (after.state["outcome"] == kind for kind in (1, 2))
        named = {"new_state": after.state["alive"], "solved": solved, "conflict": conflict}
        named |= {"replaced": after.halted, "target": after.state["target"]}
        for name, each in named.items():
            assert np.array_equal(pool[f"{name}_{number}"], each), f"{where}: {name}"
        assert int(sums["bad"]) == pool[f"contradiction_before_{number}"].sum(), where
        for name, each in after.state.items():
            state[name][rows] = each
        ages[rows] = after.steps
        for row in rows[after.halted].tolist():
            state["alive"][row] = state["entered"][row] = fresh[next_board]
            state["target"][row], ages[row] = solutions[next_board], 0
            next_board += 1
        assert np.array_equal(pool[f"state_{number}"], state["alive"]), where
        assert np.array_equal(pool[f"age_{number}"], ages), where
    final = _load(run, f"step_{len(known['train'])}").network.state_dict()
    worst = max((network.state_dict()[name] - each).abs().max() for name, each in final.items())
    print(f"{run.name}: weights differ by {worst:.2g}")
    assert worst <= _WEIGHTS


def _assert_outputs(network, run: Path, output, draws: _Recorded) -> None:
    prediction = output.prediction
    index = network._draw_symmetry(draws, use="look")[:, None]
    with np.load(run / "outputs_step_1.npz") as golden:
        ours = {
            "bce": _in_frame(prediction.keep, index).transpose(0, 1),
            "softmax": _in_frame(prediction.digit, index).transpose(0, 1),
            "conflict": prediction.conflict.detach().T[..., None],
        }
        for name, each in ours.items():
            np.testing.assert_allclose(each, golden[name], atol=_OUTPUTS, rtol=0, err_msg=name)


@pytest.mark.parametrize("run", _RUNS, ids=lambda run: run.name)
def test_the_solver_is_replayed(run):
    """Every round of every chain, and the answers: the first chain that is solved."""
    known = expected(run)["solver"]
    changes = {"kill_threshold": known["threshold"], "temperature": known["temperature"]}
    model = _load(run, known["weights"], eval_conflict_threshold=known["conflict_threshold"], **changes)
    network, chains, arrays = model.network.eval(), known["chains"], np.load(run / "solver.npz")
    puzzles = torch.from_numpy(arrays["puzzles"])
    slots, queue = [], list(range(len(puzzles)))
    rounds, resets, answers = {}, dict.fromkeys(queue, 0), {}
    for call in range(known["calls"]):
        for slot in range(known["slots"]):
            if len(slots) <= slot:
                slots.append(queue.pop(0) if queue else None)
        of_row = [None if puzzle is None else puzzle for puzzle in slots for _ in range(chains)]
        rows = torch.tensor([row for row, puzzle in enumerate(of_row) if puzzle is not None])
        entered = puzzles[[puzzle for puzzle in of_row if puzzle is not None]]
        given = {"look symmetry": "symmetry", "look values": "digits", "cell": "cell_canonical"}
        given |= {"value": "digit_canonical"}
        draws = _Recorded(**{use: torch.from_numpy(arrays[name][call])[rows] for use, name in given.items()})
        alive = torch.from_numpy(arrays["states"][call])[rows]
        state = {"alive": alive, "entered": entered, "target": torch.zeros_like(alive)}
        state["outcome"] = torch.zeros(len(rows), dtype=torch.uint8)
        inputs = torch.zeros(alive.shape[:2], dtype=torch.int32)
        after, prediction = network(state, inputs, inputs[:, 0], reasoning=model.eval_reasoning, draws=draws)
        np.testing.assert_allclose(
            prediction.conflict[:, -1].detach(), arrays["conflict_logit"][call][rows], atol=_OUTPUTS, rtol=0
        )
        conflict, solved = (torch.from_numpy(arrays[name][call])[rows] for name in ("conflict", "solved"))
        assert torch.equal(after["outcome"], (solved * 1 + conflict * 2).byte()), call
        moved = torch.from_numpy(arrays["new_states"][call])[rows]
        assert torch.equal(after["alive"], torch.where(conflict[:, None, None], entered, moved)), call
        assert torch.equal(prediction.q_halt > 0, solved)
        for slot, puzzle in enumerate(slots):
            own = [position for position, row in enumerate(rows.tolist()) if row // chains == slot]
            if puzzle is None:
                continue
            rounds[puzzle] = rounds.get(puzzle, 0) + 1
            if solved[own].any():
                answers[puzzle] = after["alive"][own][int(solved[own].int().argmax())]
            else:
                resets[puzzle] += int(conflict[own].sum())
            if puzzle in answers or rounds[puzzle] == known["max_rounds"]:
                slots[slot] = queue.pop(0) if queue else None
    for puzzle, is_solved in enumerate(known["solved"]):
        assert (puzzle in answers) == is_solved
        assert rounds[puzzle] == known["puzzle_calls"][puzzle]
        assert resets[puzzle] == known["resets"][puzzle]
        if is_solved:
            assert np.array_equal(answers[puzzle], arrays["final"][puzzle])

"""Compares LDT with its public trainer and solver, on the golden runs ldt_*."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from dataset.loader import Batch
from dataset.metadata import usual_metadata
from distributed.collectives import all_ranks
from distributed.flat import FlatParameters
from models import HaltingModel, build_model
from models.carry import Carry, State
from models.lattice import NO_GUESS, leaves, move
from models.ldt import LDTPrediction
from optimizers.weights import build_weights
from tests.golden import GOLDEN, Differences, expected
from tests.tiny import tiny_arch

_TOLERANCE = 5e-5  # of outputs and weights
_NAMES = {
    **{"backbone.layers.": "blocks.layers.", "backbone.": "", "_embed.weight": "_embed"},
    **{"bce_head": "keep_head", "softmax_head": "digit_head", "ffn.fc1": "up_proj", "ffn.fc2": "down_proj"},
    **{"in_proj_weight": "qkv_proj.weight", "out_proj": "o_proj"},
    **{f"{part}_proj.bias": f"{part}_bias" for part in "qkv"},
}


def translate(weights: dict[str, torch.Tensor], *, num_heads: int) -> dict[str, torch.Tensor]:
    """Converts the names and layouts of the public weights to ours.

    Without rotary embeddings, drops the bias of the keys, because it then has no effect on attention. In the
    public code, the dimensions 2 i and 2 i + 1 of a head are a rotary pair. Ours pairs the dimensions i and
    i + head_dim / 2.
    """
    translated: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        for public, ours in _NAMES.items():
            name = name.replace(public, ours)
        if name.endswith((".q_proj.weight", ".k_proj.weight", ".q_bias", ".k_bias")):
            value = value.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).reshape(value.shape)
        if name.endswith("in_proj_bias"):
            block = name.removesuffix("in_proj_bias")
            translated[f"{block}q_bias"], _, translated[f"{block}v_bias"] = value.chunk(3)
        elif name.endswith((".q_proj.weight", ".k_proj.weight", ".v_proj.weight")):  # they come in this order
            packed = f"{name[: -len('q_proj.weight')]}qkv_proj.weight"
            translated[packed] = torch.cat((translated.get(packed, value[:0]), value))
        elif not name.endswith("_idx"):
            translated[name] = value
    return translated


class _Recorded:
    """Replaces random numbers by recorded ones: symmetries, orders of values, and guessed cells and values.

    given: {use: recorded numbers}.
    """

    arrays: dict[str, torch.Tensor] = {}

    def __init__(self, given: dict[str, np.ndarray]):
        self.given = {use: torch.from_numpy(each) for use, each in given.items()}

    def integers(self, shape, *, below, use):
        return self.given[use]

    def uniform(self, shape, *, use):
        if use.endswith("values"):  # numbers that sort as recorded
            return self.given[use].argsort(-1) / 1e3
        chosen = self.given[use].clamp(min=0)[:, None]
        return torch.full((len(chosen), *shape), 0.5).scatter(1, chosen, 1.0)


def _load(run: Path, weights: str, operator: dict) -> HaltingModel:
    known = expected(run)
    public, loss = known["arch"], known["loss"]
    values = {"hidden_size": public["dim"], "num_heads": public["n_heads"], "loops": public["n_loops"]}
    values |= {"num_layers": public["num_layers"], "expansion": public["ffn_mult"], "dropout": 0.0}
    values |= {"pos_encodings": "rope" if public["use_rope"] else "learned"}
    values |= dict.fromkeys(("conflict_threshold", "eval_conflict_threshold"), operator["conflict_threshold"])
    values |= {"kill_threshold": operator["threshold"], "temperature": operator["temperature"]}
    values |= {"halt_max_steps": known["operator"]["max_age"] + 1, "kill_weight": loss["eliminate_weight"]}
    values |= {f"{name}_weight": loss[f"{name}_weight"] for name in ("keep", "digit", "conflict")}
    arch, num_values = tiny_arch("ldt", **values), public["n_channels"]
    size = num_values + (2 if known["task"] == "sudoku" else 1)  # padding, and a blank, are no values
    metadata = usual_metadata(
        vocab_size=size,
        seq_len=public["seq_len"],
        num_puzzle_identifiers=1,
        candidates=tuple(token * size + token for token in range(size - num_values, size)),
        may_turn=True,
        may_permute=operator["permute_digits"],
    )
    model = build_model(arch, metadata)
    stored = translate(torch.load(run / weights, weights_only=True), num_heads=arch.num_heads)
    buffers = {name: getattr(model.network, name) for name in ("candidates", "symmetries")}
    model.network.load_state_dict(stored | buffers)
    return model


def _new(entered: torch.Tensor, target: torch.Tensor) -> State:
    boards = {"alive": entered.clone(), "entered": entered.clone(), "target": target.clone()}
    outcome = torch.zeros(len(entered), dtype=torch.uint8)
    return boards | {"outcome": outcome, "guess": torch.full_like(outcome, NO_GUESS, dtype=torch.int16)}


def find_runs(folder: Path = GOLDEN) -> list[Path]:
    """Returns the folders of the golden runs of LDT in which each board has one solution."""
    runs = [path.parent for path in sorted(folder.glob("ldt_*/expected.json"))]
    return [run for run in runs if expected(run)["n_solutions"] == 1]


def replay(run: Path) -> Differences:
    """Trains as the public trainer did, and compares losses, gradients, boards and the final weights.

    The boards of all slots are compared after every training step. Raises AssertionError if a value differs
    too much.
    """
    known, seen = expected(run), Differences()
    options, size = known["optimizer"], known["pool_size"]
    model = _load(run, "step_0", known["operator"])
    network, reasoning = model.network, model.reasoning
    flat = FlatParameters(network.named_parameters(), ranks=all_ranks())
    flat.attach_gradients()
    chosen = SimpleNamespace(optimizer="adamw", **options)
    weights = build_weights(chosen, flat)
    boards, rng, pool = (np.load(run / f"{name}.npz") for name in ("boards", "draws", "pool"))
    fresh, solutions = torch.from_numpy(boards["fresh_x"]), torch.from_numpy(boards["fresh_solutions"][:, 0])
    state, ages, waiting = _new(fresh[:size], solutions[:size]), torch.zeros(size).int(), size
    for number, golden in enumerate(known["train"]):
        given = {"cell": rng[f"cell_canonical_{number}"], "value": rng[f"digit_canonical_{number}"]}
        recorded, of_move = (
            _Recorded(
                given
                | {"look symmetry": rng[f"{public}_symmetry_{number}"]}
                | {"look values": rng[f"{public}_digits_{number}"]}
            )
            for public in ("loss", "step")
        )
        rows = torch.from_numpy(rng[f"rows_{number}"])
        blank = torch.zeros(len(rows), fresh.shape[1], dtype=torch.int32)
        data = Batch(blank, blank, blank[:, 0], rows)
        boards_now = {name: each[rows] for name, each in state.items()}
        before = Carry(boards_now, ages[rows], torch.zeros(len(rows)).bool(), data)
        output = model.train()(before, reasoning, recorded)
        divisors = {"slots": len(rows), **network.objective.divisors(before)}
        flat.gradients.zero_()
        loss, sums = network.objective.losses(
            network, before, output, divisors=divisors, reasoning=reasoning, rng=None
        )
        (loss / len(rows)).backward()

        where = f"{run.name}, step {golden['step']}"
        found = {"loss": loss.detach() / len(rows), "grad_norm": flat.gradients.norm()}
        found |= {"bce_loss": sums["keep_loss"] / len(rows)}
        found |= {"conflict_loss": sums["conflict_loss"] / len(rows), "digit_cells": divisors["digit_cells"]}
        found |= {"digit_loss": sums["digit_loss"] / max(golden["digit_cells"], 1)}
        for name, value in found.items():
            relative = 5e-4 if name == "grad_norm" else 1e-4
            tolerance = {"relative": relative, "absolute": 1e-6, "what": f"{where}: {name}"}
            quantity = "gradients" if name == "grad_norm" else "loss"
            seen.compare(quantity, float(value), golden[name], **tolerance)
        if number == 0:
            index = network.symmetry.sample(recorded)
            _compare_outputs(seen, output.prediction, index, run / "outputs_step_1.npz")
        weights.clip_(options["clip_norm"])
        weights.update_(golden["lr"], step=number + 1)

        # The public trainer moves the boards by another pass, with the updated weights.
        last = network.look(before.state["alive"], of_move, loops=reasoning.loops).last()
        after = output.carry._replace(state=move(before.state, last, network.arch, reasoning, of_move))
        after = after._replace(halted=leaves(after.state) | (after.steps >= reasoning.max_steps))
        moved = {"new_state": after.state["alive"], "replaced": after.halted, "target": after.state["target"]}
        moved |= {"solved": after.state["outcome"] == 1, "conflict": after.state["outcome"] == 2}
        for name, each in moved.items():
            assert np.array_equal(pool[f"{name}_{number}"], each), f"{where}: {name}"
        for name, each in after.state.items():
            state[name][rows] = each
        ages[rows] = after.steps
        for row in rows[after.halted].tolist():
            for name, each in _new(fresh[waiting, None], solutions[waiting, None]).items():
                state[name][row] = each[0]
            ages[row], waiting = 0, waiting + 1
        assert np.array_equal(pool[f"state_{number}"], state["alive"]), where
        assert np.array_equal(pool[f"age_{number}"], ages), where
    final = _load(run, f"step_{len(known['train'])}", known["operator"]).network.state_dict()
    for name, each in final.items():
        what = f"{run.name}: {name} after the last step"
        seen.compare("weights", network.state_dict()[name], each, absolute=_TOLERANCE, what=what)
    return seen


def _compare_outputs(seen: Differences, prediction: LDTPrediction, index: torch.Tensor, path: Path) -> None:
    with np.load(path) as golden:
        for name, ours in (("bce", prediction.keep), ("softmax", prediction.digit)):
            canonical = ours.detach().flatten(2).gather(2, index[:, None].expand(-1, ours.shape[1], -1))
            theirs = golden[name].swapaxes(0, 1).reshape(canonical.shape)
            seen.compare("outputs", canonical, theirs, absolute=_TOLERANCE, what=f"{path}: {name}")
        conflict = prediction.conflict.detach().T[..., None]
        seen.compare("outputs", conflict, golden["conflict"], absolute=_TOLERANCE, what=f"{path}: conflict")


def replay_solver(run: Path) -> Differences:
    """Solves puzzles as the public solver did, and compares every chain after every thinking step.

    Also compares the answer of the first chain that solves a puzzle. Raises AssertionError if a value differs
    too much.
    """
    seen = Differences()
    known, arrays = expected(run)["solver"], np.load(run / "solver.npz")
    model = _load(run, known["weights"], known)
    network, chains, free = model.network.eval(), known["chains"], [0] * known["slots"]
    for puzzle, calls in enumerate(known["puzzle_calls"]):
        slot = free.index(min(free))
        rows, resets = slice(slot * chains, (slot + 1) * chains), 0
        entered = torch.from_numpy(arrays["puzzles"][puzzle]).expand(chains, -1, -1)
        state, blank = _new(entered, entered), torch.zeros(entered.shape[:2], dtype=torch.int32)
        for call in range(free[slot], free[slot] + calls):
            theirs = {name: each[call, rows] for name, each in arrays.items() if len(each) == known["calls"]}
            assert np.array_equal(state["alive"], theirs["states"])
            given = {"look symmetry": theirs["symmetry"], "look values": theirs["digits"]}
            rng = _Recorded(given | {"cell": theirs["cell_canonical"], "value": theirs["digit_canonical"]})
            with torch.inference_mode():
                state, prediction = network(
                    state, blank, blank[:, 0], reasoning=model.eval_reasoning("max"), rng=rng
                )
            logit = prediction.conflict[:, -1]
            what = f"{run.name}, puzzle {puzzle}, call {call}: conflict"
            seen.compare("solver", logit, theirs["conflict_logit"], absolute=_TOLERANCE, what=what)
            assert np.array_equal(state["outcome"], theirs["solved"] + 2 * theirs["conflict"])
            is_open = ~theirs["conflict"]
            assert np.array_equal(state["alive"][is_open], theirs["new_states"][is_open])
            is_solved = prediction.q_halt > 0
            resets += 0 if is_solved.any() else int(theirs["conflict"].sum())
        free[slot] += calls
        assert (is_solved.any(), resets) == (known["solved"][puzzle], known["resets"][puzzle])
        if is_solved.any():
            assert np.array_equal(state["alive"][is_solved.int().argmax()], arrays["final"][puzzle])
    return seen

"""The moving average against the plain one over every value in every step, and what reads it."""

import contextlib
import io
from collections.abc import Iterator

import pytest
import torch

from distributed.collectives import all_ranks
from distributed.flat import FlatParameters
from models.network import Network
from optimizers.average import Average, DenseAverage, RowAverage, warn_of_long_average
from optimizers.puzzle_table import Replicated
from tests.checkpoints import assert_equal, begin_training, do_step
from tests.float64 import assert_close
from tests.ranks import run_ranks
from tests.tiny import FACTS, random_batch, tiny_config, tiny_model
from training.state import build_first_state

_RATE = 0.9
_TABLE = "puzzle_emb.weights"


def _clones(network: Network) -> dict[str, torch.Tensor]:
    """Everything that is trained."""
    trained = {**dict(network.named_parameters()), _TABLE: network.puzzle_emb.weights}
    return {name: tensor.detach().clone() for name, tensor in trained.items()}


def _averages(network: Network, *, corrects_bias: bool = False) -> tuple[Average, Replicated]:
    flat = FlatParameters(network.named_parameters(), ranks=all_ranks())
    average = DenseAverage(flat, rate=_RATE, corrects_bias=corrects_bias)
    num_rows = len(network.puzzle_emb.weights)
    table = Replicated(network.puzzle_emb, num_rows, all_ranks(), weight_decay=0.0, slot_counts=[])
    table.average = RowAverage(table, rate=_RATE, corrects_bias=corrects_bias)
    return average, table


def _random_steps(network: Network, average: Average, table: Replicated, *, num_steps: int) -> Iterator[int]:
    """Changes the weights at random, equally on all ranks; yields the steps."""
    generator = torch.Generator().manual_seed(0)
    for step in range(1, num_steps + 1):
        # Some rows are touched often, some once in a while, some never; twice nothing is.
        rows = torch.randint(FACTS.num_puzzle_identifiers - 2, (3,), generator=generator).unique()
        rows = rows[: 0 if step in (7, 8) else None]
        table.average.before_change(rows.repeat(2), step=step)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter += torch.randn(parameter.shape, generator=generator)
            network.puzzle_emb.weights[rows] += torch.randn(len(rows), 32, generator=generator)
        average.update(range(step, step + 1))
        yield step


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("corrects_bias", [False, True])
def test_equals_the_average_of_everything_in_every_step(corrects_bias):
    network = tiny_model().network
    (average, table), plain = _averages(network, corrects_bias=corrects_bias), _clones(network)
    if corrects_bias:
        plain = {name: torch.zeros_like(value) for name, value in plain.items()}
    for step in _random_steps(network, average, table, num_steps=40):
        plain = {name: _RATE * plain[name] + (1 - _RATE) * now for name, now in _clones(network).items()}
        if step % 10 == 3:
            found = average.values(step=step) | table.average.values(step=step)
            for name, value in plain.items():
                expected = value / (1 - _RATE**step) if corrects_bias else value
                assert_close(found[name], expected, what=name)


def _warn() -> str:
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        warn_of_long_average(0.999, num_steps=10)
    return stderr.getvalue()


def test_one_rank_warns_for_all():
    first, second = run_ranks(_warn, 2)
    assert first.startswith("warning (rank 0): ema=0.999 averages over about 1000 steps")
    assert second == ""


@pytest.mark.parametrize(
    ("rate", "told"),
    [
        (0.998, ["over about 500 steps", "ends at step 625", "make up 29% of", "ema_bias_correction=true"]),
        (0.99, []),
    ],
)
def test_an_average_over_too_many_steps_is_a_warning(capsys, rate, told):
    warn_of_long_average(rate, num_steps=625)
    error = capsys.readouterr().err
    assert error.count("warning") == bool(told)
    assert all(part in error for part in told)


@pytest.mark.parametrize("corrects_bias", [False, True])
def test_steps_beyond_where_this_start_ends_do_not_count(capsys, corrects_bias):
    """With the correction, the average contains no initial weights."""
    config = tiny_config(ema=0.99, ema_bias_correction=corrects_bias, max_steps=10, compile=False)
    build_first_state(config, FACTS, device=torch.device("cpu"), total_steps=10_000)
    error = capsys.readouterr().err
    assert ("ends at step 10. The initial weights still make up 90% of" in error) != corrects_bias
    assert ("warning" in error) != corrects_bias


def test_every_name_of_a_weight_has_its_average(monkeypatch):
    """Layers of a plugin may share a weight. With another value for one, a program reads another model."""
    model = tiny_model(forward_dtype="bfloat16")
    network = model.network
    network.lm_head.weight = network.embed_tokens.embedding_weight
    network.L_level.layers.append(network.L_level.layers[0])
    monkeypatch.setattr("training.model.build_model", lambda *_: model)
    state = build_first_state(tiny_config(ema=_RATE), FACTS, device=torch.device("cpu"))
    for average in state.average.tensors().values():
        average.fill_(0.25)
    saved, found = state.sections()["weights"], state.exports()["ema_weights"]
    for name in ("lm_head.weight", "L_level.layers.1.mlp.down_proj.weight"):
        assert saved[name].dtype == torch.float32
        assert (found[name] == 0.25).all()


def test_reading_changes_nothing():
    """In float32: a value that is rounded to bfloat16 and back would be another one."""
    config = tiny_config(ema=_RATE)
    state = begin_training(config)
    do_step(state, config, random_batch(config.global_batch_size))
    trained = _clones(state.model.network)
    averages = {name: tensor.clone() for name, tensor in state.sections()["ema_state"].items()}
    state.exports()
    with state.averaged():
        pass
    assert_equal(state.sections()["ema_state"], averages)
    assert_equal(_clones(state.model.network), trained)


@pytest.mark.usefixtures("float64")
def test_every_step_averages_what_it_trains():
    config = tiny_config(ema=_RATE)
    state = begin_training(config)
    first = plain = _clones(state.model.network)
    for step in range(6):
        do_step(state, config, random_batch(config.global_batch_size, seed=step))
        now = _clones(state.model.network)
        plain = {name: _RATE * plain[name] + (1 - _RATE) * value for name, value in now.items()}
    found = state.exports()["ema_weights"]
    for name, value in plain.items():
        assert_close(found[name], value, what=name)
        assert not torch.equal(found[name], first[name]), name
        assert not torch.equal(found[name], now[name]), name


@pytest.mark.usefixtures("float64")
def test_averages_are_swapped_in_and_out_whatever_happens():
    network = tiny_model().network
    (average, table), raw = _averages(network), _clones(network)
    with torch.no_grad():
        for tensor in (*network.parameters(), network.puzzle_emb.weights):
            tensor += 1
    tensors = dict(network.named_parameters())
    with contextlib.suppress(KeyError), average.averaged(step=0), table.average.averaged(step=0):
        inside = {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}
        raise KeyError
    for name, value in raw.items():
        assert_close(inside[name], value, what=name)  # there was no step
        assert torch.equal(network.state_dict()[name], value + 1), name
    assert all(tensors[name] is parameter for name, parameter in network.named_parameters())


def test_a_step_touches_only_the_rows_of_its_puzzles():
    _, table = _averages(tiny_model().network)
    steps = table.average.tensors()["table.steps"]
    table.average.before_change(torch.tensor([3, 5]), step=7)
    assert steps.nonzero().flatten().tolist() == [3, 5]
    assert steps[[3, 5]].tolist() == [6, 6]

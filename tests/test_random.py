"""Random numbers: the published generator, and what a number depends on."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from models.carry import Carry
from models.random import SlotRng, philox, random_bits, sample_keys
from tests.float64 import assert_close
from tests.tiny import FACTS, draws_of, random_batch, run_step, tiny_model

_SHAPE = (5, 7)


# Known answers of the generator's authors (Random123, philox4x32, 10 rounds).
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0_A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_generator_is_the_published_one(counter, key, expected):
    bits = philox(tuple(torch.tensor([each]) for each in counter), (key & 2**32 - 1, key >> 32))
    assert tuple(map(int, bits)) == expected


def slot_keys(batch_size: int, step: int = 1) -> torch.Tensor:
    return torch.from_numpy(sample_keys(seed=3, step=step, batch_size=batch_size))


def test_random_bits_depend_on_key_stream_and_position_alone():
    keys = slot_keys(3)
    bits = random_bits(keys, 1001, stream=2)
    assert bits.shape == (3, 1001)
    assert torch.equal(random_bits(keys[1:2], 500, stream=2)[0], bits[1, :500])
    assert len({*bits.flatten().tolist(), *random_bits(keys, 1001, stream=3).flatten().tolist()}) > 6000
    assert not torch.equal(slot_keys(3), slot_keys(3, step=2))
    assert (slot_keys(1000) >= 0).all()
    assert (slot_keys(1000) < 2**62).all()


def _draws(rows, samples, steps, *, seed: int = 3) -> SlotRng:
    columns = torch.broadcast_tensors(*(torch.as_tensor(each) for each in (rows, samples, steps)))
    return SlotRng.of_evaluation(seed, rows=columns[0], samples=columns[1], steps=columns[2].int())


def test_every_part_of_the_counter_counts():
    here = _draws([1], 2, 3).normal(_SHAPE, use="z_L")
    others = [
        _draws([2], 2, 3).normal(_SHAPE, use="z_L"),
        _draws([1], 3, 3).normal(_SHAPE, use="z_L"),
        _draws([1], 2, 4).normal(_SHAPE, use="z_L"),
        _draws([1], 2, 3).normal(_SHAPE, use="z_H"),
        _draws([1], 2, 3, seed=4).normal(_SHAPE, use="z_L"),
        _draws([1], 2, 3, seed=3 + 2**40).normal(_SHAPE, use="z_L"),
        SlotRng.of_training(
            3, step=1, slots=slice(2 << 16 | 3, (2 << 16 | 3) + 1), device=here.device
        ).normal(_SHAPE, use="z_L"),
    ]
    for other in others:
        assert not torch.isclose(here, other).any()


def test_moments():
    """Of 400,000 numbers: the mean of their first four powers, and where truncated ones end."""
    rng = _draws(torch.arange(1000), 0, 1)
    normal = rng.normal((400,), use="a").double()
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3)):
        assert float((normal**power).mean()) == pytest.approx(moment, abs=0.05)
    rows = np.corrcoef(normal[:50].numpy())
    assert np.abs(rows - np.eye(50)).max() < 0.25, "5 standard deviations"
    cut = rng.truncated_normal((400,), use="a").double()
    assert float(cut.std()) == pytest.approx(1, abs=0.01)
    assert float(cut.abs().max()) == pytest.approx(2 / 0.8796, abs=1e-3)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("name", "cycles"), [("hrm", 2), ("trm", 2), ("urm", 1), ("serrm", 1)])
def test_damping_and_noise_of_every_call(name, cycles):
    """Against the equations of EqR, call by call."""
    model = tiny_model(name, state_noise=0.2, damping=0.7, H_cycles=cycles, L_cycles=3).eval()
    network, batch, rng = model.network, random_batch(3), _draws(torch.arange(3), 0, 1)
    state, rotary = network.initial_state(3, seq_len=FACTS.seq_len), network.rotary
    e, of_tokens = network.embed(batch.inputs, batch.puzzle_identifiers), name != "serrm"
    z, numbers = dict(state), {"H": itertools.count(), "L": itertools.count()}

    def mix(axis: str, called: torch.Tensor, use: str) -> None:
        noise = rng.normal(called.shape[1:], use=use)
        z[axis] = 0.3 * z[axis] + 0.7 * called + 0.2 * noise

    for _, call in itertools.product(range(cycles), range(3)):
        if "z_L" not in state:
            called = network.L_level(z["z_H"], e, rotary, *(() if of_tokens else (None,)))
            mix("z_H", called, f"L {call}" if of_tokens else f"z_H {call}")
            continue
        mix("z_L", network.L_level(z["z_L"], z["z_H"] + e, rotary), f"L {next(numbers['L'])}")
        if call == 2:
            slow = "H" if name == "hrm" else "L"
            called = getattr(network, f"{slow}_level")(z["z_H"], z["z_L"], rotary)
            mix("z_H", called, f"{slow} {next(numbers[slow])}")
    reasoning = model.eval_reasoning("max")
    after, _ = network(state, batch.inputs, batch.puzzle_identifiers, reasoning=reasoning, rng=rng)
    for axis, value in z.items():
        assert_close(after[axis], value)


@pytest.mark.usefixtures("float64")
def test_noise_before_a_step_is_on_z_L():
    model = tiny_model().eval()
    batch, rng = random_batch(3), _draws(torch.arange(3), 0, 1)
    state = model.network.initial_state(3, seq_len=FACTS.seq_len)
    noise = rng.normal(state["z_L"].shape[1:], use="step z_L")
    moved = {**state, "z_L": state["z_L"] + 0.3 * noise}
    quiet, data = model.eval_reasoning("max"), (batch.inputs, batch.puzzle_identifiers)
    expected, _ = model.network(moved, *data, reasoning=quiet)
    noisy = dataclasses.replace(quiet, step_noise=0.3)
    steps = torch.zeros(3, dtype=torch.int32)
    found = model(Carry(state, steps, steps > 0, batch), noisy, rng).carry.state
    for name, z in expected.items():
        assert_close(found[name], z)


@pytest.mark.usefixtures("float64")
def test_random_start_of_the_slots_that_begin():
    model = tiny_model(init_noise=0.5).train()
    batch, rng = random_batch(4), draws_of(4)
    carry = run_step(model, model.initial_carry(batch), batch, rng=rng).carry
    begins = torch.tensor([True, False, True, False])
    carry = carry._replace(halted=begins, steps=torch.full((4,), 2, dtype=torch.int32))
    seen = []
    model.network.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    run_step(model, carry, batch, rng=rng)
    for name, z in seen[0].items():
        start = 0.5 * rng.truncated_normal(z.shape[1:], use=f"start {name}")
        assert_close(z[begins], start[begins])
        assert torch.equal(z[~begins], carry.state[name][~begins])

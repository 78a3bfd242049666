"""The networks against plain loops over their levels: values, and which calls carry gradient."""

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F

import models
from config.architecture import architectures
from config.compose import compose_overrides
from config.schema import PretrainConfig
from dataset.loader import Batch
from distributed.collectives import all_ranks
from distributed.flat import FlatParameters
from evaluation.loop import answer_batches
from evaluation.test_time import build_draw
from models import HaltingModel, build_model
from models.blocks import Block, block_weights
from models.carry import Reasoning, StepOutput
from models.compilation import compile_blocks
from models.layers import SwiGLU
from tests.float64 import assert_close
from tests.tiny import FACTS, draws_of, embed, random_batch, run_losses, run_step, tiny_arch, tiny_model

_NAMES = tuple(name for name, arch in architectures().items() if "loss" in arch.model_fields)


def rms_norm(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    return x / (x.square().mean(dim, keepdim=True) + 1e-5).sqrt()


def _assert_same_gradients(network: torch.nn.Module, logits: torch.Tensor, expected: torch.Tensor) -> None:
    """The same logits, and the same gradient of every parameter through them."""
    assert_close(logits, expected)
    weights = torch.randn_like(expected)
    parameters = dict(network.named_parameters())
    found, wanted = (
        torch.autograd.grad((each * weights).sum(), list(parameters.values()), allow_unused=True)
        for each in (logits, expected)
    )
    for name, ours, theirs in zip(parameters, found, wanted, strict=True):
        assert_close(ours, theirs, what=name)


@pytest.mark.usefixtures("float64")
def test_mixing_positions_by_a_swiglu():
    torch.manual_seed(0)
    block = Block(mlp_t=SwiGLU(6, expansion=4), mlp=SwiGLU(16, expansion=4), eps=1e-5)
    assert {name.partition(".")[0] for name, _ in block.named_parameters()} == {"mlp_t", "mlp"}
    assert block.mlp_t.down_proj.weight.shape == (6, 256)
    h = torch.randn(2, 6, 16)

    def swiglu(layer, x: torch.Tensor) -> torch.Tensor:
        gate, up = (x @ layer.gate_up_proj.weight.T).chunk(2, dim=-1)
        return (F.silu(gate) * up) @ layer.down_proj.weight.T

    mixed = rms_norm(h + swiglu(block.mlp_t, h.transpose(1, 2)).transpose(1, 2), dim=1)
    expected = rms_norm(mixed + swiglu(block.mlp, mixed), dim=2)
    assert_close(block(h, None), expected)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("gradient_cycles", [0, 1, 3])
@pytest.mark.parametrize(
    ("name", "cycle", "num_last"),
    [("hrm", "LLH", 2), ("trm", "LLH", 2), ("trm_singlez", "QQ-", 2), ("urm", "QQ", 1)],
)
def test_gradients_are_those_of_the_last_cycles(name, cycle, num_last, gradient_cycles):
    """L and H: calls of the fast and of the slow latent. With one latent, Q: it sees the question."""
    model = tiny_model(name, H_cycles=3, L_cycles=2, gradient_cycles=gradient_cycles)
    network, batch, calls = model.network, random_batch(3), cycle * 3
    state, rotary = network.initial_state(3, seq_len=FACTS.seq_len), network.rotary
    assert state.keys() == ({"z_H", "z_L"} if "H" in cycle else {"z_H"})
    e = embed(network, batch)
    z_H, z_L = state["z_H"], state.get("z_L")
    for number, call in enumerate(calls):
        if number == len(calls) - (len(cycle) * gradient_cycles or num_last):
            z_H, z_L = z_H.detach(), z_L if z_L is None else z_L.detach()
        if call == "L":
            z_L = network.L_level(z_L, z_H + e, rotary)
        elif call == "H":
            z_H = (network.H_level if name == "hrm" else network.L_level)(z_H, z_L, rotary)
        else:
            z_H = network.L_level(z_H, (call == "Q") * e, rotary)
    expected = network.lm_head(z_H)[:, network.arch.num_puzzle_positions :]
    kept, prediction = network(state, batch.inputs, batch.puzzle_identifiers, reasoning=model.reasoning)
    assert kept.keys() == state.keys()
    assert_close(kept["z_H"], z_H.detach())
    _assert_same_gradients(network, prediction.logits, expected)


@pytest.mark.parametrize("name", _NAMES)
def test_blocks_that_are_cast_beforehand_have_the_bits_of_a_cast_for_every_use(name):
    results = []
    for is_cast in (True, False):
        torch.manual_seed(0)
        cycles = {"gradient_cycles": 2} if name in ("hrm", "trm", "urm", "serrm") else {}
        model = tiny_model(name, forward_dtype="bfloat16", **cycles).train()
        flat = FlatParameters(
            model.network.named_parameters(),
            ranks=all_ranks(),
            cast=block_weights(model.network) if is_cast else (),
            compute_dtype=torch.bfloat16,
        )
        dtypes = {each.dtype for key, each in flat.parameters.items() if key in block_weights(model.network)}
        assert dtypes == {torch.bfloat16 if is_cast else torch.float32}
        flat.attach_gradients()
        batch = random_batch(4)
        rng = draws_of(4, **({"keys": torch.arange(4)} if name == "serrm" else {}))
        output, losses = run_losses(model, model.initial_carry(batch), batch, rng=rng)
        losses()
        with flat.gradients_attached():
            output.prediction.logits.float().square().sum().backward()
        results.append(
            {"logits": output.prediction.logits, **output.carry.state, "gradients": flat.gradients}
        )
    for key, ours in results[0].items():
        assert torch.equal(ours, results[1][key]), key


@pytest.mark.usefixtures("float64")
def test_the_transformer_answers_in_one_pass():
    model = tiny_model("transformer").train()
    batch = random_batch(4)
    output = run_step(model, model.initial_carry(batch), batch)
    assert output.carry.halted.all()
    again = run_step(model, output.carry, batch)
    assert torch.equal(output.prediction.logits, again.prediction.logits)
    h = embed(model.network, batch)
    for block in model.network.blocks.layers:
        h = block(h, model.network.rotary)
    expected = model.network.lm_head(h)[:, model.network.arch.num_puzzle_positions :]
    assert_close(output.prediction.logits, expected)


_MIXINGS = ({}, {"mlp_t": True, "pos_encodings": "none"}, {"conv": "beside", "pos_encodings": "learned"})
_EMBEDDINGS = ((0, 0), (0, 5), (32, 1), (32, 5), (40, 0))  # puzzle_emb_ndim, puzzle_emb_len
_PLAIN_NAMES = [name for name in _NAMES if name not in ("serrm", "fprm")]


@pytest.mark.parametrize("row", range(len(_EMBEDDINGS)))
@pytest.mark.parametrize("name", _PLAIN_NAMES)
def test_everything_trains_with_any_puzzle_embedding(name, row):
    """Every pair of a network, a way to mix and an embedding."""
    mixing = _MIXINGS[(row + _PLAIN_NAMES.index(name)) % len(_MIXINGS)]
    puzzle_emb_ndim, puzzle_emb_len = _EMBEDDINGS[row]
    model = tiny_model(name, puzzle_emb_ndim=puzzle_emb_ndim, puzzle_emb_len=puzzle_emb_len, **mixing)
    batch = random_batch(4)
    output = run_step(model.train(), model.initial_carry(batch), batch, rng=draws_of(4))
    positions = (puzzle_emb_len or -(-puzzle_emb_ndim // 32)) if puzzle_emb_ndim else 0
    shapes = {state: tuple(tensor.shape) for state, tensor in output.carry.state.items() if state[0] == "z"}
    assert output.prediction.logits.shape == (4, FACTS.seq_len, FACTS.vocab_size)
    kept = {"transformer": (), "urm": ("z_H",), "trm_singlez": ("z_H",)}.get(name, ("z_H", "z_L"))
    assert shapes == dict.fromkeys(kept, (4, positions + FACTS.seq_len, 32))
    (output.prediction.logits.sum() + output.prediction.q_halt.sum()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    if puzzle_emb_ndim:
        identifiers, gradients = model.network.puzzle_emb.pop_gradients()
        assert torch.equal(identifiers, batch.puzzle_identifiers)
        assert gradients.abs().sum(-1).all()


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", _PLAIN_NAMES)
def test_everything_trains_with_convolutions(name):
    model = tiny_model(name, conv="instead", pos_encodings="none", puzzle_emb_ndim=0)
    batch = random_batch(4)
    output = run_step(model.train(), model.initial_carry(batch), batch, rng=draws_of(4))
    (output.prediction.logits.sum() + output.prediction.q_halt.sum()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    z = torch.randn(4, FACTS.seq_len, 32)
    head, q = model.network.q_head, torch.stack(model.network.q_values(z), dim=1)
    assert_close(q, z.mean(dim=1) @ head.weight.T + head.bias, what="Q sees all cells")


@pytest.mark.usefixtures("float64")
def test_a_call_of_a_fixed_point_begins_with_the_cells_before_and_ends_with_a_norm():
    """FPRM for mazes and ARC; its public vectors have a grid, and no norm."""
    network = tiny_model("fprm", conv_type="conv1d", norm_placement="output", puzzle_emb_ndim=64).network
    level, rotary = network.L_level, network.rotary
    y, e = torch.randn(2, 2, FACTS.seq_len + 2, 32)
    before = [F.pad(y[:, 2:], (0, 0, shift, -shift)) for shift in range(4)]
    convolved = sum(
        weight * each for weight, each in zip(level.conv.weight[:, 0].T.flip(0), before, strict=True)
    )
    a1, a2 = level.alpha_1_param.sigmoid(), level.alpha_2_param.sigmoid()
    assert_close(torch.stack((a1, a2)), torch.tensor([[0.75], [0.25]]).expand(2, 32))
    b2 = 1 - a2 * a1**2
    b1 = b2 * (1 - a1) / (1 - a1**2 + 1e-5)
    (block,) = level.layers
    h = a2 * torch.cat((y[:, :2], convolved), dim=1) + b2 * e
    h = a1 * h + b1 * block.self_attn(rms_norm(h), rotary)
    h = a1 * h + b1 * block.mlp(rms_norm(h))
    assert_close(level(y, e, rotary), rms_norm(h))


@pytest.mark.usefixtures("float64")
def test_a_cell_reaches_as_far_as_there_are_convolutions():
    """Two blocks: two cells far. URM's own convolution is along the sequence, so it is TRM here."""
    options = {"conv": "instead", "pos_encodings": "none", "puzzle_emb_ndim": 0, "H_cycles": 1, "L_cycles": 1}
    model, batch = tiny_model("trm", **options), random_batch(1)
    network = model.network
    changed = batch.inputs.clone()
    changed[0, 0] = (changed[0, 0] + 1) % FACTS.vocab_size
    state = network.initial_state(1, seq_len=FACTS.seq_len)
    before, after = (
        network(state, inputs, batch.puzzle_identifiers, reasoning=model.reasoning)[1].logits
        for inputs in (batch.inputs, changed)
    )
    differs = (before != after).any(-1).view(4, 4)
    assert differs[:3, :3].all()
    assert differs.sum() == 9


def test_convolutions_need_a_grid():
    arch = tiny_arch("trm", conv="instead", pos_encodings="none", puzzle_emb_ndim=0)
    facts = dataclasses.replace(FACTS, seq_len=15)
    with pytest.raises(ValueError, match="arch.conv=instead needs a grid, but .* seq_len 15 is not a square"):
        build_model(arch, facts)
    facts = dataclasses.replace(facts, num_columns=5)
    assert build_model(arch, facts).network.L_level.layers[0].conv.num_columns == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "count", "vocab_size", "seq_len"),
    [
        ("serrm_sudoku", 1_970_176, 11, 81),
        ("serrm_maze", 1_976_832, 6, 900),
        ("serrm_arc1", 1_967_104, 12, 900),
        ("urm_sudoku", 13_662_210, 11, 81),
        ("trm_sudoku_attention", pytest.approx(7e6, rel=0.05), 11, 81),
        ("trm_sudoku_mlp", pytest.approx(5e6, rel=0.05), 11, 81),
        ("flow_sudoku", 5_298_178, 11, 81),
        ("sudoku_transformer", pytest.approx(27e6, rel=0.05), 11, 81),
        ("sudoku_extreme", pytest.approx(27e6, rel=0.02), 11, 81),
    ],
)
def test_published_numbers_of_parameters(experiment, count, vocab_size, seq_len):
    """Without the puzzle table, whose rows are hidden_size + vocab_size for SE-RRM."""
    arch = compose_overrides(PretrainConfig, [f"experiment={experiment}", "arch.forward_dtype=float32"]).arch
    facts = dataclasses.replace(FACTS, vocab_size=vocab_size, seq_len=seq_len)
    with torch.device("meta"):
        network = build_model(arch, facts).network
    assert sum(parameter.numel() for parameter in network.parameters()) == count
    if experiment == "serrm_arc1":
        assert network.puzzle_emb.weights.shape == (20, 268)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("hrm", {"q_target": "exact", "forward_dtype": "bfloat16"}),
        ("hrm", {"q_target": "deferred", "init_noise": 0.1, "state_noise": 0.1}),
        ("trm", {"mlp_t": True, "pos_encodings": "none"}),
        ("urm", {"conv": "beside"}),
        ("fprm", {"init_noise": 6.0}),
        ("flow", {}),
        ("serrm", {"dropout": 0.1}),
        ("transformer", {}),
        ("ldt", {}),
    ],
)
def test_a_rank_without_slots_has_no_gradient_and_the_same_sums(name, changes):
    model, found = tiny_model(name, **changes).train(), []
    for number in (0, 4):
        batch = random_batch(number)
        arrays = {"keys": torch.arange(number)} if name == "serrm" else {}
        rng = draws_of(number, **arrays)
        output, losses = run_losses(model, model.initial_carry(batch), batch, rng=rng)
        loss, sums = losses()
        model.zero_grad()
        loss.backward()
        found.append((sums.keys(), output.carry.tensors().keys()))
        is_moved = [bool(each.grad.any()) for each in model.parameters() if each.grad is not None]
        assert any(is_moved) == (number > 0)
    assert found[0] == found[1]


def _answer(model: HaltingModel, batches: list[Batch], reasoning: Reasoning) -> StepOutput:
    """Returns the last output of an evaluation without noise, except that of a flow."""
    options = {"draw": build_draw(model.network, reasoning, seed=0), "on_step": lambda *_: None}
    return [*answer_batches(model, iter(batches), reasoning, **options)][-1]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("damping", [1.0, 0.7])
@pytest.mark.parametrize("name", ["trm", "hrm"])
def test_recorded_calls_are_those_of_a_plain_loop(name, damping):
    model = tiny_model(name, H_cycles=2, L_cycles=3, mlp_t=False).eval()
    network, batches = model.network, [random_batch(3, seed=seed) for seed in (1, 2)]
    reasoning = dataclasses.replace(model.eval_reasoning("max"), max_steps=2, damping=damping)
    expected, block, rotary = [], network.L_level.layers[0], network.rotary

    def call_level(state: str, where: tuple[int, int, int], z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if state == "z_L" or name == "trm":
            mixed = rms_norm(z + x + block.self_attn(z + x, rotary))
            expected.append(("L_level.layers.0.mlp", *where, block.mlp(mixed)))
        level = network.H_level if state == "z_H" and name == "hrm" else network.L_level
        z = z + damping * (level(z, x, rotary) - z)
        expected.append((state, *where, z))
        return z

    for batch in batches:
        z_H, z_L = network.initial_state(3, seq_len=FACTS.seq_len).values()
        e = embed(network, batch)
        for step, cycle in itertools.product((1, 2), (1, 2)):
            x = z_H + e
            for number in (1, 2, 3):
                z_L = call_level("z_L", (step, cycle, number), z_L, x)
            z_H = call_level("z_H", (step, cycle, 4), z_H, z_L)
    with models.record(model, ["z_H", "z_L", "L_level.layers.0.ml?"]) as seen:
        _answer(model, batches, reasoning)
    assert [(each.name, each.step, each.cycle, each.call) for each in seen] == [each[:4] for each in expected]
    for ours, theirs in zip(seen, expected, strict=True):
        assert_close(ours.output, theirs[-1])
    rows = [each.rows.tolist() for each in seen[:: len(seen) // 2]]
    assert rows == [each.rows.tolist() for each in batches]


@pytest.mark.parametrize("name", [name for name in _NAMES if name != "transformer"])
def test_every_state_is_recorded(name):
    """The value of z_H after the last call of a step is the one from which the network answers."""
    model = tiny_model(name).eval()
    reasoning = dataclasses.replace(model.eval_reasoning("max"), max_steps=2, damping=0.9)
    with models.record(model, ["z_H", "lm_head"]) as seen:
        output = _answer(model, [random_batch(2)], reasoning)
    z_H = [each for each in seen if each.name == "z_H"]
    assert torch.equal(z_H[-1].output, output.carry.state["z_H"])
    assert {each.step for each in z_H} == {1, 2}
    assert {each.cycle for each in z_H} == {*range(1, max(reasoning.H_cycles, 1) + 1)}
    assert seen[-1].name == "lm_head"
    assert all((a.output != b.output).any() for a, b in itertools.pairwise(z_H))


def test_a_recording_refuses_what_it_cannot_see(monkeypatch):
    def refusal(model: torch.nn.Module, *names: str) -> str:
        with pytest.raises(ValueError, match="record") as error, models.record(model, names):
            run_step(model, model.initial_carry(random_batch(2)), random_batch(2))
        return str(error.value)

    model = tiny_model("trm").eval()
    assert "Choose from embed_tokens, puzzle_emb, L_level" in refusal(model, "L_level.layers.9.*")
    assert refusal(model, "z_Q") == "cannot record z_Q: no call of a level changes it. Remove it."
    assert "ran no thinking step in evaluation mode" in refusal(model.train(), "z_H")
    assert "Pass a HaltingModel" in refusal(torch.nn.Identity(), "z_H")
    reasoning, state = model.eval_reasoning("max"), model.network.initial_state(2, seq_len=FACTS.seq_len)
    data = random_batch(2)
    with pytest.raises(ValueError, match="called without its HaltingModel"), models.record(model, ["z_H"]):
        model.eval().network(state, data.inputs, data.puzzle_identifiers, reasoning=reasoning)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *_, **__: None)  # takes seconds
    compile_blocks(model)
    assert refusal(model.eval(), "z_H").startswith("cannot record a compiled model.")
    hooks = torch.nn.modules.module
    assert not hooks._global_forward_hooks
    assert not hooks._global_forward_pre_hooks

"""SE-RRM against a plain computation of its formulas, on relabelled puzzles; its dropout and random stops."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dataset.loader import Batch
from models import build_model
from models.layers import Dropout
from tests.float64 import assert_close
from tests.test_networks import rms_norm
from tests.test_random import slot_keys
from tests.tiny import FACTS, random_batch, run_step, tiny_arch, tiny_model

_SIZES = {"L_layers": 2, "H_cycles": 2, "L_cycles": 3}
_KINDS = {
    "equivariant": {},
    "with a puzzle table": {"add_tokens": 0, "puzzle_emb_ndim": 1},
    "without a grid": {"pos_encodings": "rope", "gradient_cycles": 0},
    "not equivariant": {"equivariant_symbols": False, "puzzle_emb_ndim": 1},
    "learned positions": {"equivariant_symbols": False, "pos_encodings": "learned", "add_tokens": 0},
}


def _model(seed: int = 0, **changes):
    return tiny_model("serrm", seed=seed, **{**_SIZES, "puzzle_emb_ndim": 0, **changes})


# ------------------------------------------------------------------------------------------------- the oracle


def _rotate(x: Tensor, positions: str) -> Tensor:
    """Rotates one head [..., length, head_dim], cell by cell; added positions are behind."""
    rows = []
    for place, row in enumerate(x.unbind(-2)):
        size, pairs = x.shape[-1], x.shape[-1] // 2
        if place >= FACTS.seq_len or positions == "learned":
            rows.append(row)
            continue
        if positions == "rope":
            angles = [place * 10000.0 ** (-2 * i / size) for i in range(pairs)]
        else:
            f = [10000.0 ** (-4 * j / size) for j in range(size // 4)]
            side = int(FACTS.seq_len**0.5)
            angles = [(place // side) * each for each in f] + [(place % side) * each for each in f]
        cos, sin = torch.tensor(angles).cos(), torch.tensor(angles).sin()
        x1, x2 = row[..., :pairs], row[..., pairs:]
        rows.append(torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1))
    return torch.stack(rows, -2)


def _attention(x: Tensor, weights: dict[str, Tensor], name: str, heads: int, positions: str) -> Tensor:
    """Attends along the last but one axis, head by head."""
    q, k, v = (each.chunk(heads, -1) for each in (x @ weights[f"{name}.qkv_proj.weight"].T).chunk(3, -1))
    found = []
    for head in range(heads):
        scores = _rotate(q[head], positions) @ _rotate(k[head], positions).mT
        found.append(torch.softmax(scores / q[head].shape[-1] ** 0.5, -1) @ v[head])
    return torch.cat(found, -1) @ weights[f"{name}.o_proj.weight"].T


def _embed(w: dict[str, Tensor], arch, batch: Batch, rows: Tensor | None) -> Tensor:
    K, S, A = FACTS.vocab_size, FACTS.seq_len, arch.add_tokens
    e = []
    for b in range(len(batch.inputs)):
        for k in range(K):
            ordinary = arch.equivariant_symbols and k >= 2
            special = arch.equivariant_symbols and k < 2
            for i in range(S):
                s_k = (
                    w["embed_symbol_tokens"][0, 0, 0]
                    if ordinary
                    else w["embed_special_tokens" if special else "embed_symbols"][0, k, 0]
                )
                cell = K**0.5 * s_k if batch.inputs[b, i] == k else torch.zeros_like(s_k)
                if arch.pos_encodings == "learned":
                    cell = cell + w["pos_embedding"][0, 0, i]
                if rows is not None:
                    cell = cell + rows[b, : arch.hidden_size] + rows[b, arch.hidden_size + k]
                e.append(cell)
            for a in range(A):
                name = "add_tokens_special" if special else "add_tokens"
                e.append(w[name][0, 0 if ordinary else k, a])
    return torch.stack(e).view(len(batch.inputs), K, S + A, arch.hidden_size)


def _oracle(network, arch, batch: Batch, rows: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns z, logits and confidence of a first step."""
    w = dict(network.named_parameters())
    e = _embed(w, arch, batch, rows)
    z = network.H_init.expand(e.shape)
    calls = arch.H_cycles * arch.L_cycles
    for call in range(calls):
        if call == calls - (arch.gradient_cycles * arch.L_cycles or 1):
            z = z.detach()
        h = z + e
        for layer in range(arch.L_layers):
            name = f"L_level.layers.{layer}"
            h = rms_norm(h + _attention(h, w, f"{name}.attn", arch.num_heads, arch.pos_encodings))
            along = h.transpose(1, 2)
            mixed = _attention(along, w, f"{name}.attn_t", arch.num_heads_t, "learned")
            h = rms_norm(h + mixed.transpose(1, 2))
            gate, up = (h @ w[f"{name}.mlp.gate_up_proj.weight"].T).chunk(2, -1)
            h = rms_norm(h + (F.silu(gate) * up) @ w[f"{name}.mlp.down_proj.weight"].T)
        z = h
    cells, head = z[:, :, : FACTS.seq_len], w["lm_head.weight"]
    if arch.equivariant_symbols:
        logits = torch.einsum("bkid,d->bik", cells, head[0])
    else:
        logits = torch.einsum("bkid,vkd->biv", cells, head.view(-1, FACTS.vocab_size, arch.hidden_size))
    confidence = torch.softmax(logits, -1).max(-1).values.min(-1).values
    return z, logits, confidence


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kind", _KINDS)
def test_a_step_and_its_gradients_are_those_of_the_formulas(kind):
    options = {**_SIZES, "puzzle_emb_ndim": 0, **_KINDS[kind]}
    model, arch = _model(**options).train(), tiny_arch("serrm", **options)
    batch = random_batch(3)
    network = model.network
    rows = None
    if network.puzzle_emb is not None:
        rows = network.puzzle_emb.weights[batch.puzzle_identifiers].clone().requires_grad_()
    z, logits, confidence = _oracle(network, arch, batch, rows)
    output = run_step(model, model.initial_carry(batch), batch)
    assert_close(output.carry.state["z_H"], z.detach())
    assert_close(output.prediction.logits, logits)
    assert_close(torch.sigmoid(output.prediction.q_halt), confidence.detach())
    assert output.prediction.q_continue is None
    assert not output.prediction.q_halt.requires_grad

    weights, parameters = torch.randn_like(logits), dict(network.named_parameters())
    (output.prediction.logits * weights).sum().backward()
    leaves = [*parameters.values(), *([] if rows is None else [rows])]
    expected = torch.autograd.grad((logits * weights).sum(), leaves)
    for (name, parameter), theirs in zip(parameters.items(), expected, strict=False):
        assert_close(parameter.grad, theirs, what=name)
    if rows is not None:
        identifiers, gradients = network.puzzle_emb.pop_gradients()
        assert torch.equal(identifiers, batch.puzzle_identifiers)
        assert_close(gradients, expected[-1])


# -------------------------------------------------------------------------------------------------- positions


def test_positions_are_rows_and_columns_of_the_grid():
    """A square, where the data do not name its columns."""
    facts = dataclasses.replace(FACTS, seq_len=15)
    with pytest.raises(ValueError, match="arch.pos_encodings=rope2d needs a grid, but .* 15 is not a square"):
        build_model(tiny_arch("serrm"), facts)
    facts = dataclasses.replace(facts, num_columns=5)
    cos = build_model(tiny_arch("serrm"), facts).network.rotary[0, :15].view(3, 5, 2, -1)
    assert (cos[:, :, 0] == cos[:, :1, 0]).all(), "turned by the row"
    assert (cos[:, :, 1] == cos[:1, :, 1]).all(), "turned by the column"
    assert not torch.equal(cos[:3, 0, 0], cos[1:2, 0, 0].expand(3, -1))
    build_model(tiny_arch("serrm", pos_encodings="rope"), facts)


# ---------------------------------------------------------------------------------------------------- halting


def test_slots_halt_where_chance_has_it_and_after_the_last_step():
    model, batch = _model().train(), random_batch(4)
    stops = torch.tensor([True, False, False, True])
    carry = run_step(model, model.initial_carry(batch), batch, arrays={"stops": stops}).carry
    assert torch.equal(carry.halted, stops)
    carry = run_step(model, carry, batch, arrays={"stops": ~stops}).carry
    assert torch.equal(carry.halted, ~stops)
    assert carry.steps.tolist() == [1, 2, 2, 1]
    carry = model.initial_carry(batch)
    for step in range(1, 5):
        carry = run_step(model, carry, batch).carry  # nothing is drawn where the probability is 0
        assert carry.halted.tolist() == [step == 4] * 4


def test_confidence_near_one_keeps_its_digits():
    from models.serrm import _least_confidence

    logits = torch.tensor([[[40.0, 0.0, 0.0], [50.0, 0.0, 20.0]], [[1.0, 1.0, 1.0], [9.0, 0.0, 0.0]]])
    found = _least_confidence(logits)
    assert found[0].item() == pytest.approx(30.0)
    assert torch.sigmoid(found[1]).item() == pytest.approx(1 / 3)


def test_stops_are_a_pure_function_of_seed_and_step():
    def draw(seed: int = 3, step: int = 7, probability: float = 0.25):
        model = _model(halt_exploration_prob=probability)
        drawn = model.network.sample_randomness(
            seed=seed, step=step, batch_size=100_000, reasoning=model.reasoning
        )
        return drawn.get("stops")

    assert (draw() == draw()).all()
    assert (draw() != draw(step=8)).any()
    assert (draw() != draw(seed=4)).any()
    assert draw().mean() == pytest.approx(0.25, abs=0.01)
    assert draw(probability=1.0).all()
    assert draw(probability=0.0) is None


# ---------------------------------------------------------------------------------------------------- dropout


def test_dropout_drops_its_share_and_keeps_the_mean():
    x = torch.ones(4 * 5, 10, 500)
    dropped = Dropout(slot_keys(4), 0, 0.2)(x)
    assert (dropped == 0).float().mean().item() == pytest.approx(0.2, abs=0.005)
    assert dropped.unique().tolist() == pytest.approx([0, 1.25])
    assert torch.equal(Dropout(slot_keys(4)[2:3], 0, 0.2)(x[:5]), dropped[10:15]), "a slot alone"


@pytest.mark.usefixtures("float64")
def test_dropout_is_that_of_training_and_of_each_slot():
    model, batch = _model(dropout=0.3), random_batch(6)
    carry, keys = model.initial_carry(batch), slot_keys(6)
    model.eval()
    evaluated = run_step(model, carry, batch).prediction.logits
    assert torch.equal(run_step(model, carry, batch, arrays={"keys": keys}).prediction.logits, evaluated)
    plain = _model(dropout=0.0).train()
    assert torch.equal(run_step(plain, plain.initial_carry(batch), batch).prediction.logits, evaluated)
    model.train()
    trained = run_step(model, carry, batch, arrays={"keys": keys}).prediction.logits
    assert (trained - evaluated).abs().max() > 1e-3
    other = run_step(model, carry, batch, arrays={"keys": slot_keys(6, step=2)}).prediction.logits
    assert (other - trained).abs().max() > 1e-3
    some = slice(2, 5)
    part = run_step(model, carry.select(some), batch.select(some), arrays={"keys": keys[some]})
    assert_close(part.prediction.logits, trained[some])


@pytest.mark.usefixtures("float64")
def test_dropout_draws_anew_in_every_layer_call_and_attention(monkeypatch):
    model, batch, drawn = _model(dropout=0.3).train(), random_batch(2), []
    plain = Dropout.__call__

    def watched(self, x):
        drawn.append((tuple(self.keys.tolist()), self.stream))
        return plain(self, x)

    monkeypatch.setattr(Dropout, "__call__", watched)
    run_step(model, model.initial_carry(batch), batch, arrays={"keys": slot_keys(2)})
    assert len(drawn) == 2 * 3 * 2 * 2, "H cycles, L cycles, layers, attentions"
    assert len(set(drawn)) == len(drawn)

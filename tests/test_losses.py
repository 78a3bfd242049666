"""Losses and metrics against loops over single cells and slots."""

import math

import pytest
import torch

from config.architecture import LossConfig
from config.files import load_defaults
from dataset.metadata import IGNORE_LABEL_ID
from models.carry import Carry, Prediction, StepOutput
from models.objective import ContinueTarget, Objective, Sums, softmax_cross_entropy, stablemax_cross_entropy
from tests.float64 import TOLERANCE, assert_close
from tests.tiny import FACTS, random_batch

_SLOTS = 6


class _Losses(Objective):
    """The losses alone, with targets of q_continue that are given."""

    def __init__(self, loss_type: str = "softmax_cross_entropy", *, targets=(), **changes: float):
        values = load_defaults("arch/hrm")["loss"] | {"halting_weight": 0.3, "loss_type": loss_type}
        self.loss, self.targets = LossConfig(**values | changes), targets

    def continue_targets(self, *_) -> list[ContinueTarget]:
        return self.targets

    def of(self, output: StepOutput) -> tuple[torch.Tensor, Sums]:
        return self.losses(None, None, output, divisors={}, reasoning=None, rng=None)


def _output(seed: int = 0) -> StepOutput:
    """Slot 0 is entirely right, slot 1 has no label, slots 0..3 have halted."""
    generator = torch.Generator().manual_seed(seed)
    batch = random_batch(_SLOTS, seed=seed)
    batch.labels[1] = IGNORE_LABEL_ID
    logits = torch.randn(_SLOTS, FACTS.seq_len, FACTS.vocab_size, generator=generator) * 3
    right = torch.nn.functional.one_hot(batch.labels[0].clamp(min=0).long(), FACTS.vocab_size)
    logits[0] = right * 20.0
    q = torch.randn(2, _SLOTS, generator=generator)
    carry = Carry(
        state={"z_H": torch.zeros(0)},
        steps=torch.tensor([1, 2, 3, 4, 2, 1], dtype=torch.int32),
        halted=torch.tensor([True] * 4 + [False] * 2),
        data=batch,
    )
    return StepOutput(carry, Prediction(logits.requires_grad_(), *q))


def _targets(output: StepOutput) -> list[ContinueTarget]:
    values, q = torch.rand(_SLOTS, generator=torch.Generator().manual_seed(1)), output.prediction
    somewhere, everywhere = torch.tensor([True, True, False] * 2), torch.ones(_SLOTS, dtype=torch.bool)
    return ((q.q_continue, values, everywhere), (q.q_halt, values**2, somewhere))


def _stablemax(logits: list[float]) -> list[float]:
    s = [x + 1 if x >= 0 else 1 / (1 - x + 1e-30) for x in logits]
    return [value / sum(s) for value in s]


def _softmax(logits: list[float]) -> list[float]:
    s = [math.exp(x) for x in logits]
    return [value / sum(s) for value in s]


def _bce(logit: float, target: float) -> float:
    p = 1 / (1 + math.exp(-logit))
    return -target * math.log(p) - (1 - target) * math.log(1 - p)


def _naive(output: StepOutput, targets, probabilities) -> dict[str, float]:
    names = ("count", "accuracy", "exact_accuracy", "q_halt_accuracy", "steps")
    names += ("first_step_count", "exact_accuracy_after_step_1")
    sums = dict.fromkeys((*names, "lm_loss", "q_halt_loss", "q_continue_loss"), 0.0)
    for slot in range(_SLOTS):
        labels = output.carry.data.labels[slot].tolist()
        cells = [cell for cell, label in enumerate(labels) if label != IGNORE_LABEL_ID]
        if not cells:
            continue
        logits = output.prediction.logits[slot].tolist()
        sums["lm_loss"] += sum(-math.log(probabilities(logits[c])[labels[c]]) for c in cells) / len(cells)
        right = [max(range(len(logits[c])), key=logits[c].__getitem__) == labels[c] for c in cells]
        q_halt = output.prediction.q_halt[slot].item()
        sums["q_halt_loss"] += _bce(q_halt, float(all(right)))
        for logits, values, mask in targets:
            if mask[slot]:
                sums["q_continue_loss"] += _bce(logits[slot].item(), values[slot].item())
        if output.carry.steps[slot] == 1:
            sums["first_step_count"] += 1
            sums["exact_accuracy_after_step_1"] += all(right)
        if output.carry.halted[slot]:
            sums["count"] += 1
            sums["accuracy"] += sum(right) / len(cells)
            sums["exact_accuracy"] += all(right)
            sums["q_halt_accuracy"] += (q_halt >= 0) == all(right)
            sums["steps"] += output.carry.steps[slot].item()
    return sums


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("loss_type", "probabilities"),
    [("stablemax_cross_entropy", _stablemax), ("softmax_cross_entropy", _softmax)],
)
@pytest.mark.parametrize("with_target", [True, False])
def test_sums_are_those_of_the_loops(loss_type, probabilities, with_target):
    output = _output()
    targets = _targets(output) if with_target else ()
    loss, sums = _Losses(loss_type, targets=targets).of(output)
    expected = _naive(output, targets, probabilities)
    total = expected["lm_loss"] + 0.3 * (expected["q_halt_loss"] + expected["q_continue_loss"])
    assert loss.item() == pytest.approx(total, rel=TOLERANCE)
    if not with_target:
        assert "q_continue_loss" not in sums
        del expected["q_continue_loss"]
    assert {name: float(sums[name]) for name in expected} == pytest.approx(expected, rel=TOLERANCE)
    assert expected["exact_accuracy"] == 1
    assert expected["count"] == 3
    assert expected["first_step_count"] == 2
    assert expected["exact_accuracy_after_step_1"] == 1


def test_stablemax_stays_finite_where_softmax_would_not():
    logits = torch.tensor([[[1e4, -1e4, 0.0]]])
    labels = torch.tensor([[1]])
    value = stablemax_cross_entropy(logits, labels, label_smoothing=0.0)
    assert value.dtype == torch.float64
    assert value.item() == pytest.approx(-math.log(_stablemax([1e4, -1e4, 0.0])[1]), rel=TOLERANCE)
    assert softmax_cross_entropy(logits, labels, label_smoothing=0.0).item() == pytest.approx(2e4)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("cross_entropy", [softmax_cross_entropy, stablemax_cross_entropy])
def test_label_smoothing_is_the_mean_over_smoothed_labels(cross_entropy):
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 3, 5), torch.tensor([[0, 4, IGNORE_LABEL_ID], [2, 2, 1]])
    of_labels = (torch.full((2, 3), label) for label in range(5))
    by_label = torch.stack([cross_entropy(logits, each, label_smoothing=0.0) for each in of_labels], dim=-1)
    for cell in torch.cartesian_prod(torch.arange(2), torch.arange(3)).tolist():
        share = torch.full((5,), 0.3 / 5)
        label = labels[tuple(cell)].item()
        found = cross_entropy(logits, labels, label_smoothing=0.3)[tuple(cell)]
        if label == IGNORE_LABEL_ID:
            assert found == 0
            continue
        share[label] += 0.7
        assert found.item() == pytest.approx((share * by_label[tuple(cell)]).sum().item(), rel=TOLERANCE)


@pytest.mark.usefixtures("float64")
def test_later_steps_weigh_less():
    """Slots are at the steps 1, 2, 3, 4, 2, 1; the gradient of a slot is that of its weighted loss."""
    output = _output()
    plain, plain_sums = _Losses().of(output)
    decayed, sums = _Losses(supervision_decay=0.7).of(output)
    numbers, expected = ({name: float(value) for name, value in each.items()} for each in (sums, plain_sums))
    assert numbers == expected
    logits, weights = output.prediction.logits, (1, 0.7, 0.49, 0.343, 0.7, 1)
    before, after = (torch.autograd.grad(loss, logits)[0] for loss in (plain, decayed))
    for slot, weight in enumerate(weights):
        assert_close(after[slot], weight * before[slot])
    total = 0.0
    for slot, weight in enumerate(weights):
        alone = _output()
        alone.carry.data.labels[torch.arange(_SLOTS) != slot] = IGNORE_LABEL_ID
        total += weight * _Losses().of(alone)[0].item()
    assert decayed.item() == pytest.approx(total, rel=TOLERANCE)

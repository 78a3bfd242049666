"""The rules of the dense weights: torch's own with their options, and which weights each of them moves."""

import functools

import pytest
import torch

from config.architecture import architectures
from models.blocks import block_weights
from optimizers.weights import AdamW, Muon, Weights, build_weights
from parallel.collectives import all_ranks
from parallel.flat import FlatParameters
from tests.float64 import assert_close
from tests.tiny import tiny_config, tiny_model


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            functools.partial(AdamW, beta1=0.8, beta2=0.9),
            functools.partial(torch.optim.AdamW, betas=(0.8, 0.9)),
        ),
        (Muon, functools.partial(torch.optim.Muon, momentum=0.95, adjust_lr_fn="match_rms_adamw")),
    ],
)
def test_a_state_that_is_there_from_the_start_changes_nothing(ours, theirs):
    results = []
    for rule in (ours, theirs):
        generator = torch.Generator().manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(24, 8, generator=generator))
        optimizer = rule([weight], lr=0.1, weight_decay=0.5)
        assert bool(optimizer.state) == (rule is ours)
        for _ in range(3):
            weight.grad = torch.randn(weight.shape, generator=generator)
            optimizer.step()
        results.append(weight.detach())
    assert_close(*results)


def _build(network: torch.nn.Module, optimizer: str) -> tuple[FlatParameters, Weights]:
    matrices = [name for name in block_weights(network) if network.get_parameter(name).ndim == 2]
    options = {"undecayed": network.undecayed, "unsplit": matrices if optimizer == "muon" else ()}
    flat = FlatParameters(network.named_parameters(), ranks=all_ranks(), **options)
    weights = build_weights(tiny_config(optimizer=optimizer), flat)
    return flat, weights


@pytest.mark.parametrize("name", architectures())
@pytest.mark.parametrize("optimizer", ["adam_atan2", "adamw", "muon"])
def test_every_weight_moves_by_one_rule(optimizer, name):
    network = tiny_model(name).network
    flat, weights = _build(network, optimizer)
    of_weight = {weight: each for each, weight in network.named_parameters()}
    moved = [{of_weight[w] for w in group.optimizer.param_groups[0]["params"]} for group in weights.groups]
    assert sum(map(len, moved)) == len(set.union(*moved)) == len(of_weight)
    if optimizer == "muon":
        in_blocks = {each for each in flat.parameters if "_level." in each or "blocks." in each}
        assert moved[-1] == {each for each in in_blocks if flat.parameters[each].ndim == 2}
    options = weights.groups[0].optimizer.param_groups[0]
    config = tiny_config()
    if optimizer == "adamw":
        assert (options["betas"], options["weight_decay"]) == (
            (config.beta1, config.beta2),
            config.weight_decay,
        )

    before = flat.weights.clone()
    flat.attach_gradients()
    flat.gradients.normal_()
    weights.update_(0.1, step=1)
    for each, weight in flat.views(before).items():
        assert not torch.equal(flat.parameters[each].detach(), weight), each


@pytest.mark.parametrize("optimizer", ["adam_atan2", "adamw", "muon"])
def test_weights_that_a_network_names_have_no_decay(optimizer):
    """Where every gradient is 0 the others shrink."""
    network = tiny_model("infiloop").network
    with torch.no_grad():
        for weight in network.parameters():
            weight.fill_(1.0)
    flat, weights = _build(network, optimizer)
    flat.attach_gradients()
    weights.update_(0.1, step=1)
    still = {name for name, weight in flat.parameters.items() if weight.eq(1).all()}
    assert (
        still
        == {*network.undecayed}
        == {f"gate_{axis}.{name}" for axis in "HL" for name in ("q", "beta_logit")}
    )


@pytest.mark.parametrize("optimizer", ["adam_atan2", "adamw", "muon"])
def test_without_gradients_everything_stands_still(optimizer):
    flat, weights = _build(tiny_model().network.requires_grad_(False), optimizer)
    before = flat.weights.clone()
    weights.update_(0.1, step=1)
    assert torch.equal(flat.weights, before)

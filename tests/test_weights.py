"""The rules of the dense weights: torch's own with their options, and which weights each of them moves."""

import functools

import pytest
import torch

from config.architecture import architectures
from distributed.collectives import ALONE, all_ranks
from distributed.flat import FlatParameters
from distributed.tensor import Cut
from models.blocks import block_weights
from optimizers.rules.adamw import AdamW
from optimizers.rules.muon import Muon, orthogonalize
from optimizers.weights import Weights, build_weights
from tests.float64 import assert_close
from tests.tiny import tiny_config, tiny_model


def _moved(rule, *, steps: int = 3) -> torch.Tensor:
    """Returns a weight after some steps of an optimizer with random gradients."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(24, 8, generator=generator))
    optimizer = rule([weight], lr=0.1, weight_decay=0.5)
    for _ in range(steps):
        weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
    return weight.detach()


def _muon(parameters, **options) -> Muon:
    return Muon({"weight": parameters[0]}, {}, ALONE, **options)


@pytest.mark.usefixtures("float64")
def test_a_state_that_is_there_from_the_start_changes_nothing():
    ours = functools.partial(AdamW, beta1=0.8, beta2=0.9)
    assert_close(_moved(ours), _moved(functools.partial(torch.optim.AdamW, betas=(0.8, 0.9))))
    assert AdamW([torch.nn.Parameter(torch.ones(2))], lr=1, beta1=0.1, beta2=0.1, weight_decay=0).state


@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (16, 16)])
def test_muon_in_bfloat16_has_the_bits_of_torch(shape):
    """Divided among ranks: tests/test_layouts.py."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    theirs = torch.nn.Parameter(torch.zeros(shape))
    theirs.grad = matrix.clone()
    torch.optim.Muon([theirs], lr=1.0, momentum=0.0, nesterov=False, adjust_lr_fn="match_rms_adamw").step()
    ours = orthogonalize(matrix, dtype=torch.bfloat16)
    assert torch.equal(torch.zeros(shape).add(ours, alpha=-0.2 * max(shape) ** 0.5), theirs.detach())

    torch_muon = functools.partial(torch.optim.Muon, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    assert torch.equal(_moved(functools.partial(_muon, dtype=torch.bfloat16)), _moved(torch_muon))


def test_muon_in_float32_is_the_method_in_float64():
    """The naive method: Newton-Schulz on the Nesterov direction, written as a loop over steps in float64."""
    generator = torch.Generator().manual_seed(0)
    weight, momentum = torch.randn(24, 8, generator=generator).double(), torch.zeros(24, 8).double()
    for _ in range(3):
        gradient = torch.randn(24, 8, generator=generator).double()
        momentum = 0.95 * momentum + 0.05 * gradient
        x = 0.05 * gradient + 0.95 * momentum
        x = x / x.square().sum().sqrt()
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
        weight = (1 - 0.1 * 0.5) * weight - 0.1 * 0.2 * 24**0.5 * x
    ours = _moved(functools.partial(_muon, dtype=torch.float32))
    assert ((ours - weight).norm() / weight.norm()) < 1e-6
    in_bfloat16 = _moved(functools.partial(_muon, dtype=torch.bfloat16))
    assert ((in_bfloat16 - weight).norm() / weight.norm()) > 1e-4, "another dtype is another rounding"


def test_muon_also_updates_matrices_that_tensor_parallel_ranks_do_not_divide():
    """Such as all matrices without tensor parallelism."""
    updated = []
    for cuts in ({}, {"divided": Cut(1, 24, 0, 24, (24, 8))}):
        generator = torch.Generator().manual_seed(0)
        matrices = {name: torch.randn(24, 8, generator=generator) for name in ("divided", "whole")}
        for matrix in matrices.values():
            matrix.grad = torch.randn(24, 8, generator=generator)
        Muon(matrices, cuts, ALONE, lr=0.1, weight_decay=0.5, dtype=torch.float32).step()
        updated.append(matrices)
    plain, with_cut = updated
    assert torch.equal(plain["whole"], with_cut["whole"])
    torch.testing.assert_close(plain["divided"], with_cut["divided"])


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

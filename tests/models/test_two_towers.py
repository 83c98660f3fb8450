"""The AlexNet of 2012 is two networks that meet only where the paper says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from farandole import models


@pytest.fixture(scope="module")
def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return models.alexnet_towers(classes=4, image_size=99, dropout=0.0)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    first, second = x.chunk(2, dim=1)
    return first, second


def reach(model: torch.nn.Sequential, start: str, end: str) -> list[list[bool]]:
    """Does a half of what leaves `end` depend on a half of what enters `start`?"""
    names = [name for name, _ in model.named_children()]
    stage = model[names.index(start) : names.index(end) + 1]
    channels = {"conv2": 96, "conv3": 256, "conv4": 384, "conv5": 384, "fc6": 256}[start]
    side = {"conv2": 11, "conv3": 5, "conv4": 5, "conv5": 5, "fc6": 2}[start]
    x = torch.rand(1, channels, side, side, requires_grad=True)
    found = []
    for half in halves(stage(x)):
        (gradient,) = torch.autograd.grad(half.sum(), x, retain_graph=True)
        found.append([bool(part.any()) for part in halves(gradient)])
    return found


@pytest.mark.parametrize(("start", "end"), [("conv2", "conv2"), ("conv4", "conv5")])
def test_a_tower_never_sees_the_other(model: torch.nn.Sequential, start: str, end: str) -> None:
    assert reach(model, start, end) == [[True, False], [False, True]]


@pytest.mark.parametrize(("start", "end"), [("conv3", "conv3"), ("fc6", "fc6"), ("conv2", "conv3")])
def test_the_towers_exchange_here(model: torch.nn.Sequential, start: str, end: str) -> None:
    assert reach(model, start, end) == [[True, True], [True, True]]


def test_conv2_of_one_tower_has_no_gradient_in_the_parameters_of_the_other(
    model: torch.nn.Sequential,
) -> None:
    # From the image on, so that conv1 and both response normalisations are in between.
    first_tower, _ = halves(model[:2](torch.rand(1, 3, 99, 99)))
    weight1, weight2 = model.conv1.conv.weight, model.conv2.conv.weight
    for weight in torch.autograd.grad(first_tower.square().sum(), [weight1, weight2]):
        own, other = weight.chunk(2, dim=0)
        assert own.any()
        assert not other.any()


def test_response_normalisation_is_the_formula_of_the_paper(model: torch.nn.Sequential) -> None:
    a = torch.rand(1, 12, 2, 2) * 20
    expected = torch.empty_like(a)
    for i in range(12):
        tower = 0 if i < 6 else 6
        neighbours = a[:, max(tower, i - 2) : min(tower + 6, i + 3)]
        expected[:, i] = a[:, i] / (2 + 1e-4 * neighbours.square().sum(dim=1)) ** 0.75
    torch.testing.assert_close(model.conv1.norm(a), expected)


def test_biases_start_at_one_where_the_paper_says(model: torch.nn.Sequential) -> None:
    ones = [
        name
        for name, parameter in model.named_parameters()
        if name.endswith("bias") and bool((parameter == 1).all())
    ]
    assert [name.split(".")[0] for name in ones] == ["conv2", "conv4", "conv5", "fc6", "fc7"]
    assert not model.conv1.conv.bias.any()
    assert model.fc6.linear.weight.std().item() == pytest.approx(0.01, rel=0.01)

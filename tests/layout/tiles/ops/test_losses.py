"""The loss of all tiles is that of the whole image, and so are its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.layout.tiles.checks import channel_parts, check, grids, numbers

SHAPE = (2, 4, 7, 5)
WEIGHT = torch.tensor([0.2, 1.0, 3.0, 0.5], dtype=torch.float64)
reductions = st.sampled_from(["mean", "sum", "none"])


def labels(ignored: int) -> Tensor:
    """One class for every pixel; some, and a whole tile of them, count for nothing."""
    found = torch.randint(0, 4, (2, 7, 5), generator=torch.Generator().manual_seed(2))
    found[:, :4, :3] = ignored
    return found


@settings(max_examples=40)
@given(grids, channel_parts, reductions, st.data())
def test_classes(grid: tuple[int, int], parts: int, reduction: str, data: st.DataObject) -> None:
    ignored = data.draw(st.sampled_from([-100, 2]))
    options: dict[str, Any] = {"reduction": reduction, "ignore_index": ignored}
    if data.draw(st.booleans()):
        options["weight"] = WEIGHT
    cut = {1: (1, 2)} if data.draw(st.booleans()) else {}
    smoothing = data.draw(st.sampled_from([0.0, 0.2]))

    def entropy(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x, y, label_smoothing=smoothing, **options)

    def likelihood(x: Tensor, y: Tensor) -> Tensor:
        return F.nll_loss(F.log_softmax(x, 1), y, **options)

    for loss in (entropy, likelihood):
        check(loss, [numbers(*SHAPE), labels(ignored)], grid, parts, axes=cut)


@settings(max_examples=20)
@given(grids, channel_parts, reductions, st.data())
def test_probabilities(
    grid: tuple[int, int], parts: int, reduction: str, data: st.DataObject
) -> None:
    weight = WEIGHT if data.draw(st.booleans()) else None
    smoothing = data.draw(st.sampled_from([0.0, 0.2]))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(
            x, y.softmax(1), weight, reduction=reduction, label_smoothing=smoothing
        )

    check(loss, [numbers(*SHAPE), numbers(*SHAPE, seed=2)], grid, parts)


ELEMENTWISE: dict[str, Any] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth l1": lambda x, y, **how: F.smooth_l1_loss(x, y, beta=0.7, **how),
    "huber": lambda x, y, **how: F.huber_loss(x, y, delta=0.7, **how),
    "bce": lambda x, y, **how: F.binary_cross_entropy(
        x.sigmoid(), y.sigmoid(), WEIGHT.reshape(4, 1, 1), **how
    ),
    "bce with logits": lambda x, y, **how: F.binary_cross_entropy_with_logits(
        x, y.sigmoid(), pos_weight=WEIGHT.reshape(4, 1, 1), **how
    ),
}


@settings(max_examples=6)
@pytest.mark.parametrize("name", ELEMENTWISE)
@given(grids, channel_parts, reductions)
def test_every_element(name: str, grid: tuple[int, int], parts: int, reduction: str) -> None:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return ELEMENTWISE[name](x, y, reduction=reduction)

    images = [numbers(*SHAPE), numbers(*SHAPE, seed=2)]
    check(loss, images, grid, parts)
    check(lambda x: loss(x, images[1]), images[0], grid, parts)  # a target that is no tile


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_of_what_every_shard_has_whole(reduction: str) -> None:
    classes = torch.tensor([1, 3])

    def loss(x: Tensor) -> Tensor:
        return F.cross_entropy(x.mean((2, 3)), classes, reduction=reduction)

    check(loss, numbers(*SHAPE), (2, 2), 2)


@pytest.mark.parametrize("margin", [1, 2])
def test_what_shards_have_beyond_their_own_counts_once(margin: int) -> None:
    kernel = numbers(4, 4, 3, 3)

    def entropy(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.conv2d(x, kernel, padding=1), y)

    def squares(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(torch.conv2d(x, kernel, padding=1), y)

    check(entropy, [numbers(*SHAPE), labels(-100)], (3, 2), margin=margin)
    check(squares, [numbers(*SHAPE), numbers(*SHAPE, seed=2)], (3, 2), margin=margin)


def test_others_need_the_whole_image() -> None:
    def divergence(x: Tensor, y: Tensor) -> Tensor:
        return F.kl_div(F.log_softmax(x, 1), y.softmax(1), reduction="batchmean")

    def weighted(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(x, y, weight=y.abs())

    for loss in (divergence, weighted):
        inputs = [numbers(*SHAPE), numbers(*SHAPE, seed=2)]
        check(loss, inputs, (2, 2), hands_off=True)

"""Whole models on tiles compute what they compute whole: outputs, gradients, running statistics.

They run in double precision, all shards in this process. The images are as small as the models
take; behind a few halvings some shards of a grid own nothing, and that must not matter either.

A change in the last digit of an image grows through every BatchNorm over few values: to 1e-8 in an
AmoebaNet-D of full depth for two images of 33 pixels, without any tiles. So here it has half of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from farandole import models
from farandole.layout.tiles.core.flow import Flow
from farandole.layout.tiles.core.grid import Grid
from farandole.layout.tiles.core.tile import cut
from farandole.models.pieces import Branches, sequence
from tests.layout.tiles.checks import flow_of, numbers, whole

TOLERANCE = 1e-8
GRIDS = ((2, 2), (3, 3), (1, 2), (3, 1))
CLASSES = 5


class Outcome(NamedTuple):
    """What a model computed: outputs and statistics, gradients, the layers where tiles ended."""

    values: dict[str, Tensor]
    gradients: dict[str, Tensor]
    ended_at: list[str]


def outcome(model: nn.Module, x: Tensor, grid: Grid | None) -> Outcome:
    """Of one step of training from the state the model is in, which is left as it was."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ended_at: list[str] = []
    x = x.clone().requires_grad_()
    model.zero_grad()
    torch.manual_seed(2)  # for dropout
    result = model(x) if grid is None else _on_tiles(model, x, grid, ended_at)
    outputs = whole(result)
    directions = [numbers(*each.shape, seed=at) for at, each in enumerate(outputs)]
    torch.autograd.backward(outputs, directions)
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    gradients["the input"] = x.grad
    values = {f"output {index}": each.detach() for index, each in enumerate(outputs)}
    values |= {name: value.clone() for name, value in model.named_buffers()}
    model.load_state_dict(before)
    found = {name: value for name, value in gradients.items() if value is not None}
    return Outcome(values, found, ended_at)


def _on_tiles(model: nn.Module, x: Tensor, grid: Grid, ended_at: list[str]) -> Any:
    flow, _ = flow_of(grid.parts[1:], grid.parts[0])
    otherwise = flow.otherwise

    def note(flow: Flow, *call: Any) -> Any:
        ended_at.append(flow.layer)
        return otherwise(flow, *call)

    def entered(name: str) -> Any:
        return lambda module, args: setattr(flow, "layer", name)

    flow.otherwise = note
    hooks = [
        module.register_forward_pre_hook(entered(name)) for name, module in model.named_modules()
    ]
    result = model(cut(flow, x, grid.image_axes))
    for hook in hooks:
        hook.remove()
    return result


def error(found: Outcome, expected: Outcome) -> float:
    """The largest, relative to the largest element of the same tensor.

    Some tensors are zero in truth, as the gradient of a bias before BatchNorm or the mean behind
    one, and rounding is all there is to compare. So none is held to more than a millionth of the
    largest of its kind.
    """
    return max(_error(found.values, expected.values), _error(found.gradients, expected.gradients))


def _error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    sizes = {name: float(value.abs().max()) for name, value in expected.items()}
    floor = 1e-6 * max(sizes.values())
    worst = 0.0
    for name, size in sizes.items():
        assert found[name].shape == expected[name].shape, name
        apart = float((found[name] - expected[name]).abs().max())
        assert math.isfinite(apart), name
        worst = max(worst, apart / (max(size, floor) or 1.0))
    return worst


def check(model: nn.Module, x: Tensor, grid: Grid) -> list[str]:
    """Fails unless the model computes the same on tiles; returns the layers where tiles ended."""
    expected = outcome(model, x, None)
    found = outcome(model, x, grid)
    assert error(found, expected) <= TOLERANCE
    return found.ended_at


def build(name: str, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return models.build(name, classes=CLASSES, **options).double()


def images(name: str, side: int, batch: int = 2) -> Tensor:
    return numbers(batch, models.spec(name).channels, side, side)


def shallow(model: nn.Sequential, dropped: str) -> nn.Sequential:
    """Without the blocks whose names match."""
    kept = [
        (name, block) for name, block in model.named_children() if not re.fullmatch(dropped, name)
    ]
    return sequence(kept)


# Of every stage one block that changes the shape and one that keeps it. Most end with images of two
# or three pixels a side, or of one: fewer than there are shards.
SHALLOW: dict[str, tuple[str, int, dict[str, Any]]] = {
    "resnet50": (r"stage\d_block[3-9]|stage[34].*|head", 9, {}),
    "resnet110_v2": (r"stage\d_unit([3-9]|1\d)", 9, {}),
    "amoebanet_d": (r"", 17, {"layers": 3, "filters": 16}),
    "unet": (r"", 11, {"width": 2, "depth": 3}),
}


@cache
def in_short(name: str) -> tuple[nn.Sequential, Tensor]:
    dropped, side, options = SHALLOW[name]
    model = shallow(build(name, image_size=side, **options), dropped)
    return model, images(name, side, 3)


@pytest.mark.parametrize("tiles", GRIDS)
@pytest.mark.parametrize("name", SHALLOW)
def test_a_model_in_short_on_every_grid(name: str, tiles: tuple[int, int]) -> None:
    ended_at = check(*in_short(name), Grid(tiles))
    assert {layer.split(".")[0] for layer in ended_at} <= {"head"}


# The images are the smallest that leave every shard something up to the head. Dropout draws what it
# draws without tiles. Of AlexNet and VGG the last two layers are left out: they see vectors only.
WHOLE: dict[str, tuple[int, tuple[int, int], str, dict[str, Any]]] = {
    "alexnet": (95, (2, 2), "fc6", {}),
    "alexnet_towers": (99, (2, 2), "fc6", {}),
    "googlenet": (45, (2, 2), "head", {}),
    "inception_v3": (107, (1, 2), "head", {}),
    "resnet50": (16, (2, 1), "head", {}),
    "resnet110_v2": (9, (2, 1), "head", {}),
    "vgg16": (64, (2, 2), "fc6", {}),
    "amoebanet_d": (33, (2, 2), "head", {"layers": 9, "filters": 16}),
    "unet": (35, (2, 2), "none", {"width": 4}),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_model(name: str) -> None:
    side, tiles, head, options = WHOLE[name]
    model = shallow(build(name, image_size=side, **options), "fc[78]")
    ended_at = check(model, images(name, side), Grid(tiles))
    assert {layer.split(".")[0] for layer in ended_at} <= {head}


def test_auxiliary_heads_end_the_tiles_for_themselves_alone() -> None:
    model = build("googlenet", image_size=31, auxiliary=True)
    ended_at = check(model, images("googlenet", 31, 3), Grid((2, 1)))
    assert {layer.split(".")[0] for layer in ended_at} == {"auxiliary1", "auxiliary2"}


def test_the_two_towers_of_alexnet_are_two_shards() -> None:
    # Linear layers are divided too: the towers exchange what they hold, as in the paper.
    model = build("alexnet_towers", image_size=99)
    assert not check(model, images("alexnet_towers", 99), Grid((1, 1), channels=2))


def test_towers_of_tiles() -> None:
    model = shallow(build("alexnet_towers", image_size=99), "fc[78]")
    ended_at = check(model, images("alexnet_towers", 99), Grid((2, 1), channels=2))
    assert {layer.split(".")[0] for layer in ended_at} == {"fc6"}


@pytest.mark.parametrize("name", SHALLOW)
def test_a_model_in_channels(name: str) -> None:
    ended_at = check(*in_short(name), Grid((1, 2), channels=3))
    assert {layer.split(".")[0] for layer in ended_at} <= {"head"}


class Residual(nn.Module):
    """What enters is added to what leaves."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


KINDS = ("conv", "max", "mean", "norm", "relu", "residual", "join", "upsample", "transposed")


@st.composite
def layers(draw: st.DrawFn, channels: int) -> tuple[nn.Module, int]:
    """A layer for so many channels, and how many leave it."""

    def each(low: int, high: int) -> tuple[int, int]:
        return draw(st.integers(low, high)), draw(st.integers(low, high))

    kind = draw(st.sampled_from(KINDS))
    out = draw(st.sampled_from([1, 2, 4]))
    kernel, stride = each(1, 4), each(1, 3)
    half = (kernel[0] // 2, kernel[1] // 2)
    if kind == "conv":
        groups = draw(st.sampled_from([1] if channels % 2 or out % 2 else [1, 2]))
        padding = draw(st.sampled_from([(0, 0), half, (3, 1)]))
        mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
        conv = nn.Conv2d(channels, out, kernel, stride, padding, each(1, 2), groups, True, mode)
        return conv, out
    if kind == "max":
        return nn.MaxPool2d(kernel, stride, half, ceil_mode=draw(st.booleans())), channels
    if kind == "mean":
        return nn.AvgPool2d(kernel, stride, half, *draw(st.tuples(*[st.booleans()] * 2))), channels
    if kind == "norm":
        # With the usual eps, a channel of two values close to each other is all rounding.
        return nn.BatchNorm2d(channels, eps=0.1), channels
    if kind == "relu":
        return nn.ReLU(), channels
    if kind == "residual":
        conv = nn.Conv2d(channels, channels, 3, padding=1)
        return Residual(nn.Sequential(conv, nn.ReLU(inplace=True))), channels
    if kind == "join":
        conv = nn.Conv2d(channels, out, (5, 3), padding="same")
        return Branches(conv=conv, pool=nn.MaxPool2d(3, 1, 1)), out + channels
    if kind == "upsample":
        mode = draw(st.sampled_from(["nearest", "bilinear"]))
        return nn.Upsample(scale_factor=each(1, 3), mode=mode), channels
    more = (draw(st.integers(0, stride[0] - 1)), draw(st.integers(0, stride[1] - 1)))
    return nn.ConvTranspose2d(channels, out, kernel, stride, half, more), out


@st.composite
def stacks(draw: st.DrawFn) -> tuple[nn.Sequential, Tensor]:
    """Layers one behind the other, and images that they take."""
    torch.manual_seed(draw(st.integers(0, 99)))
    channels = draw(st.integers(1, 4))
    x = images = torch.randn(2, channels, *draw(st.tuples(*[st.integers(3, 13)] * 2))).double()
    stack: list[nn.Module] = []
    for _ in range(draw(st.integers(1, 6))):
        layer, out = draw(layers(channels))
        try:
            after = layer.double()(x.detach())
        except (RuntimeError, ValueError):  # the layer cannot be had for so small an image
            continue
        if after.shape[2:].numel() <= 900:
            stack.append(layer)
            x, channels = after, out
    return nn.Sequential(*stack), images


@settings(max_examples=60)
@given(stack=stacks(), tiles=st.tuples(*[st.integers(1, 3)] * 2), parts=st.integers(1, 2))
def test_any_layers_one_behind_the_other(
    stack: tuple[nn.Sequential, Tensor], tiles: tuple[int, int], parts: int
) -> None:
    model, x = stack
    assert not check(model, x, Grid(tiles, parts))

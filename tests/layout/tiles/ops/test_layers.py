"""Every kind of layer, with all its options, on images of all sizes and on all grids."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from farandole.errors import UserError
from farandole.layout.tiles.core.tile import cut
from tests.layout.tiles.checks import (
    TABLE,
    channel_parts,
    check,
    check_apart,
    flow_of,
    grids,
    made,
    numbers,
)

CONVOLUTIONS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED: dict[int, Any] = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
MAX_POOLS: dict[int, Any] = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
AVG_POOLS: dict[int, Any] = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}
ADAPTIVE: dict[int, list[Any]] = {
    1: [nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d],
    2: [nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d],
    3: [nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool3d],
}
BATCH_NORMS: dict[int, Any] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
INSTANCE_NORMS: dict[int, Any] = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}

# What older versions of torch compute for such a norm is 1.
KNOWS_INFINITE_NORMS = F.lp_pool1d(torch.full((1, 1, 1), 2.0), math.inf, 1).item() == 2.0

examples = settings(max_examples=40)
few = settings(max_examples=20)


class Place:
    """A grid, an image for it, and numbers for each axis of the image."""

    def __init__(self, data: st.DataObject, channels: int | None = None, least: int = 1) -> None:
        self.draw = data.draw
        self.spatial = self.draw(st.sampled_from([2, 2, 2, 1, 3]))
        kinds = {
            1: st.sampled_from([(2,), (3,), (4,)]),
            2: grids,
            3: st.sampled_from([(2, 1, 2), (1, 3, 2)]),
        }
        self.grid = self.draw(kinds[self.spatial])
        self.parts = self.draw(channel_parts)
        self.channels = channels or self.draw(st.sampled_from([1, 2, 3, 4, 6]))
        self.image = self.each(least, 7 if self.spatial == 3 else 13)

    def each(self, least: int, most: int) -> tuple[int, ...]:
        """A number for each axis."""
        number = st.integers(least, most)
        return tuple(self.draw(number) for _ in range(self.spatial))

    def check(self, layer: Any, **options: Any) -> None:
        images = numbers(2, self.channels, *self.image)
        check(layer, images, self.grid, self.parts, **options)


@examples
@given(st.data())
def test_convolution(data: st.DataObject) -> None:
    place = Place(data, channels=data.draw(st.sampled_from([2, 4])))
    kernel, dilation = place.each(1, 4), place.each(1, 2)
    reach = [gap * (size - 1) + 1 for size, gap in zip(kernel, dilation, strict=True)]
    mode = data.draw(st.sampled_from(["zeros", "zeros", "reflect", "replicate", "circular"]))
    padding: Any = place.each(0, 3)
    if mode == "reflect":  # torch refuses a reflection of all of the image
        padding = tuple(min(pad, size - 1) for pad, size in zip(padding, place.image, strict=True))
    elif mode == "circular":
        padding = tuple(min(pad, size) for pad, size in zip(padding, place.image, strict=True))
    stride = place.each(1, 3)
    if data.draw(st.booleans()):
        padding, stride = "same", (1,) * place.spatial
        mode = "zeros"
        kernel = tuple(size | 1 for size in kernel)  # torch warns about even ones
    else:
        place.image = tuple(
            max(size, each - 2 * pad)
            for size, each, pad in zip(place.image, reach, padding, strict=True)
        )
    groups = data.draw(st.sampled_from([1, 2, place.channels]))
    outputs = groups * data.draw(st.integers(1, 3))
    bias = data.draw(st.booleans())
    kind = CONVOLUTIONS[place.spatial]
    arguments = (place.channels, outputs, kernel, stride, padding, dilation, groups, bias, mode)
    place.check(made(lambda: kind(*arguments)))


@examples
@given(st.data())
def test_transposed_convolution(data: st.DataObject) -> None:
    place = Place(data, channels=data.draw(st.sampled_from([2, 4])))
    kernel, stride, dilation = place.each(1, 4), place.each(1, 3), place.each(1, 2)
    padding = tuple(
        min(pad, gap * (size - 1) // 2)
        for pad, gap, size in zip(place.each(0, 3), dilation, kernel, strict=True)
    )
    extra = tuple(
        min(more, max(step, gap) - 1)
        for more, step, gap in zip(place.each(0, 2), stride, dilation, strict=True)
    )
    groups = data.draw(st.sampled_from([1, 2]))
    outputs = groups * data.draw(st.integers(1, 3))
    kind = TRANSPOSED[place.spatial]
    arguments = (place.channels, outputs, kernel, stride, padding, extra, groups, True, dilation)
    place.check(made(lambda: kind(*arguments)))


@examples
@given(st.data())
def test_pools(data: st.DataObject) -> None:
    place = Place(data, least=4)
    kernel, stride = place.each(1, 4), place.each(1, 3)
    padding = tuple(data.draw(st.integers(0, size // 2)) for size in kernel)  # torch allows no more
    ceil = data.draw(st.booleans())
    if data.draw(st.booleans()):
        dilation = tuple(
            1 if size > 2 else gap for size, gap in zip(kernel, place.each(1, 2), strict=True)
        )
        place.check(MAX_POOLS[place.spatial](kernel, stride, padding, dilation, False, ceil))
        return
    included = data.draw(st.booleans())
    options: dict[str, Any] = {"ceil_mode": ceil, "count_include_pad": included}
    if place.spatial > 1 and data.draw(st.booleans()):
        options["divisor_override"] = 3
    place.check(AVG_POOLS[place.spatial](kernel, stride, padding, **options))


@few
@given(st.data())
def test_adaptive_pools(data: st.DataObject) -> None:
    place = Place(data)
    kind = data.draw(st.sampled_from(ADAPTIVE[place.spatial]))
    outputs = data.draw(st.sampled_from([1, place.each(1, 6)]))
    place.check(kind(outputs))


@few
@given(st.data())
def test_power_pools(data: st.DataObject) -> None:
    grid, parts = data.draw(grids), data.draw(channel_parts)
    norm = data.draw(st.sampled_from([2, 3.0, math.inf, -math.inf]))
    pool = nn.LPPool2d(norm, data.draw(st.integers(1, 3)), ceil_mode=data.draw(st.booleans()))
    if math.isinf(norm) and not KNOWS_INFINITE_NORMS:
        with pytest.raises(UserError, match="is 1 everywhere in PyTorch"):
            check(pool, numbers(2, 3, 7, 5).abs(), grid, parts)
        return
    check(pool, numbers(2, 3, 7, 5).abs(), grid, parts)


def test_a_torch_that_does_not_know_infinite_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.11 computes them: ones, which a maximum over tiles would not be."""

    def older(x: torch.Tensor, norm: float, kernel: int) -> torch.Tensor:
        means = F.avg_pool1d(x.pow(norm), kernel)
        return (means.sign() * F.relu(means.abs())).mul(kernel).pow(1.0 / norm)

    assert older(torch.full((1, 1, 2), 3.0), math.inf, 2).item() == 1.0
    monkeypatch.setattr(F, "lp_pool1d", older)
    flow, _ = flow_of((2, 2))
    flow.layer = "stem.3"
    x = cut(flow, numbers(2, 3, 8, 6).abs(), flow.grid.image_axes)
    for norm in (math.inf, -math.inf):
        with pytest.raises(UserError, match=r"stem\.3: LPPool with norm_type=-?inf is 1 every"):
            nn.LPPool2d(norm, 2)(x)
    assert nn.LPPool2d(2, 2)(x) is not None


@few
@given(st.data())
def test_pads(data: st.DataObject) -> None:
    place = Place(data, least=2)
    mode = data.draw(st.sampled_from(["constant", "reflect", "replicate", "circular"]))
    pad: list[int] = []
    for size in reversed(place.image):
        most = size - 1 if mode == "reflect" else size if mode == "circular" else 15
        least = 0 if mode != "constant" else -(size - 1) // 2
        pad += [data.draw(st.integers(least, most)) for _ in range(2)]
    value = 1.5 if mode == "constant" else None
    place.check(lambda x: F.pad(x, pad, mode, value))


@few
@given(st.data())
def test_batch_norm(data: st.DataObject) -> None:
    place = Place(data)
    norm = made(
        lambda: BATCH_NORMS[place.spatial](
            place.channels, affine=data.draw(st.booleans()), momentum=0.3
        )
    )
    place.check(norm.train(data.draw(st.booleans())))


@few
@given(st.data())
def test_group_and_instance_norms(data: st.DataObject) -> None:
    place = Place(data, channels=data.draw(st.sampled_from([2, 4, 6])), least=2)
    affine = data.draw(st.booleans())
    groups = data.draw(st.sampled_from([1, 2, place.channels]))
    place.check(made(lambda: nn.GroupNorm(groups, place.channels, affine=affine)))
    norm = made(
        lambda: INSTANCE_NORMS[place.spatial](
            place.channels, affine=affine, track_running_stats=data.draw(st.booleans())
        )
    )
    place.check(norm.train(data.draw(st.booleans())))


class LastNorm(nn.Module):
    """Over the channels, which stand last meanwhile."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.movedim(1, -1)).movedim(-1, 1)


@few
@given(st.data())
def test_layer_norm(data: st.DataObject) -> None:
    place = Place(data, least=2)
    shape = (place.channels, *place.image)
    over = shape[data.draw(st.integers(0, len(shape) - 1)) :]
    bias = data.draw(st.booleans())
    place.check(made(lambda: nn.LayerNorm(over, bias=bias)))
    # Of one value all that is left is rounding, which eps lets grow by 1 / sqrt(1e-5).
    rounding = {"tolerance": 1e-8} if place.channels == 1 else {}
    place.check(made(lambda: LastNorm(place.channels)), **rounding)


@few
@given(st.data())
def test_local_response_norm(data: st.DataObject) -> None:
    place = Place(data)
    place.check(nn.LocalResponseNorm(data.draw(st.integers(1, 5)), alpha=0.5, k=2.0))


@examples
@given(st.data())
def test_resizing(data: st.DataObject) -> None:
    place = Place(data)
    mode = data.draw(st.sampled_from(["nearest", "nearest-exact", "area", LINEAR[place.spatial]]))
    options: dict[str, Any] = {"mode": mode}
    if mode == LINEAR[place.spatial]:
        options["align_corners"] = data.draw(st.booleans())
    how = data.draw(st.sampled_from(["size", "factor", "factors", "recomputed"]))
    if how == "size":
        options["size"] = place.each(1, 20)
    elif how == "factor":
        options["scale_factor"] = data.draw(st.sampled_from([2, 3.0, 2.5]))
    else:
        factor = st.sampled_from([1.0, 1.3, 1.75, 2.0, 3.1])
        options["scale_factor"] = tuple(data.draw(factor) for _ in range(place.spatial))
        options["recompute_scale_factor"] = how == "recomputed"
        # Of lines and volumes that are enlarged by so little that they stay as they are, torch's
        # gradient is not that of its own result.
        stays = [
            int(old * by) == old
            for old, by in zip(place.image, options["scale_factor"], strict=True)
        ]
        assume(how == "recomputed" or mode != "nearest" or place.spatial == 2 or not any(stays))
    place.check(lambda x: F.interpolate(x, **options))


def test_enlarged_by_too_little() -> None:
    """Torch then leaves an image alone, but not a line."""
    for mode in ("nearest", "nearest-exact", "bilinear"):
        check(
            partial(F.interpolate, scale_factor=(2.0, 1.3), mode=mode), numbers(2, 2, 3, 2), (1, 2)
        )
    check(partial(F.interpolate, scale_factor=1.3, mode="linear"), numbers(2, 2, 3), (2,))


@few
@given(st.data())
def test_smaller_by_a_factor(data: st.DataObject) -> None:
    place = Place(data, least=5)
    mode = data.draw(st.sampled_from(["nearest", "nearest-exact", LINEAR[place.spatial]]))
    factor = data.draw(st.sampled_from([0.5, 0.6, 0.35]))
    place.check(lambda x: F.interpolate(x, scale_factor=factor, mode=mode))


@few
@given(st.data())
def test_pixels_and_channels(data: st.DataObject) -> None:
    grid, parts = data.draw(grids), data.draw(channel_parts)
    by = data.draw(st.integers(1, 3))
    height, width = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    check(nn.PixelShuffle(by), numbers(2, 2 * by * by, height, width), grid, parts)
    check(nn.PixelUnshuffle(by), numbers(2, 2, by * height, by * width), grid, parts)
    check(nn.ChannelShuffle(by), numbers(2, 2 * by, height, width), grid, parts)


@few
@given(st.data())
def test_dropout(data: st.DataObject) -> None:
    place = Place(data)
    features = [nn.Dropout1d, nn.Dropout2d, nn.Dropout3d][place.spatial - 1]
    kind = data.draw(
        st.sampled_from([nn.Dropout, features, nn.AlphaDropout, nn.FeatureAlphaDropout])
    )
    layer = kind(data.draw(st.sampled_from([0.0, 0.3, 0.7, 1.0])), data.draw(st.booleans()))
    place.check(layer.train(data.draw(st.booleans())))


def test_dropout_draws_once_and_only_in_training() -> None:
    def states(x: torch.Tensor) -> torch.Tensor:
        """What the random numbers are after it."""
        y = F.dropout(x, 0.0) + F.dropout(x, 0.5, training=False) + F.dropout(x, 0.5)
        return y * torch.rand(1, dtype=torch.float64)

    check(states, numbers(2, 3, 6, 5), (2, 2))


class Channels(nn.Module):
    """A linear layer over the channels of every pixel."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.movedim(1, -1)).movedim(-1, 1)


@few
@given(st.data())
def test_linear(data: st.DataObject) -> None:
    place = Place(data)
    outputs = data.draw(st.integers(1, 7))
    place.check(made(lambda: Channels(place.channels, outputs)))


BETWEEN = {
    "activation": nn.SiLU,
    "prelu": lambda: nn.PReLU(4),
    "batch norm": lambda: nn.BatchNorm2d(4),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "layer norm": lambda: LastNorm(4),
    "layer norm over all": lambda: nn.LayerNorm((4, 9, 7)),
    "layer norm over rows": lambda: nn.LayerNorm(7),
    "instance norm": lambda: nn.InstanceNorm2d(4, track_running_stats=True),
    "response norm": lambda: nn.LocalResponseNorm(3),
    "dropout": lambda: nn.Dropout(0.4),
    "linear": lambda: Channels(4, 4),
    "fewer channels": lambda: Channels(4, 3),
    "softmax": lambda: nn.Softmax(1),
    "upsampling": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "pool": lambda: nn.MaxPool2d(3, 2, 1),
}


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize(("grid", "parts"), [((2, 2), 1), ((3, 2), 2), ((1, 3), 3)])
def test_what_shards_have_beyond_their_own_counts_once(
    between: str, grid: tuple[int, int], parts: int
) -> None:
    outputs = 3 if between == "fewer channels" else 4

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), BETWEEN[between](), nn.Conv2d(outputs, 2, 5, padding=2)
        )

    for margin in (1, 3):
        check(made(build), numbers(2, 2, 9, 7), grid, parts, margin=margin)


class Pooled(nn.Module):
    """A branch that goes over the whole image and back: shards have copies of it."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Conv2d(4, 4, 1)
        self.norm = nn.BatchNorm2d(4)
        self.groups = nn.GroupNorm(2, 4)
        self.large = nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = F.adaptive_avg_pool2d(x, 1)
        pooled = self.groups(F.relu(self.norm(self.small(pooled))))
        wide = F.interpolate(pooled, size=x.shape[2:], mode="bilinear")
        return torch.cat([wide, self.large(x)], 1)


class Squeeze(nn.Module):
    """Squeeze and excitation, in the many ways that it is written."""

    def __init__(self, way: int) -> None:
        super().__init__()
        self.way = way
        self.down, self.up = nn.Linear(4, 2), nn.Linear(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, channels = x.shape[:2]
        if self.way == 0:
            y = F.adaptive_avg_pool2d(x, 1).view(samples, channels)
        elif self.way == 1:
            y = F.adaptive_max_pool2d(x, 1).flatten(1)
        else:
            y = x.mean((2, 3))
        y = torch.sigmoid(self.up(F.relu(self.down(y))))
        if self.way == 0:
            return x * y.view(samples, channels, 1, 1).expand_as(x)
        return x * (y[:, :, None, None] if self.way == 1 else y.unsqueeze(-1).unsqueeze(-1))


MODELS: dict[str, Any] = {
    "pooled": Pooled,
    **{f"squeeze {way}": (lambda way=way: Squeeze(way)) for way in range(3)},
    "classifier": lambda: nn.Sequential(
        nn.Conv2d(4, 6, 3, padding=1),
        nn.GroupNorm(3, 6),
        nn.ReLU(inplace=True),
        nn.LayerNorm((6, 9, 7)),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 5),
    ),
    "resized": lambda: nn.Sequential(
        nn.ConvTranspose2d(4, 6, 3, stride=2),
        nn.InstanceNorm2d(6, affine=True),
        nn.Upsample(size=(7, 10), mode="bilinear"),
        nn.LocalResponseNorm(3),
        nn.AvgPool2d(3, 2, 1),
    ),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("grid", "parts"), [((2, 2), 1), ((3, 1), 2)])
def test_models(model: str, grid: tuple[int, int], parts: int) -> None:
    check(made(MODELS[model]), numbers(3, 4, 9, 7), grid, parts)
    check_apart(made(MODELS[model]), numbers(3, 4, 9, 7), grid, parts)


def alone(function: Any) -> Any:
    """A rule that forgets the other shards."""

    def handler(flow: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(input.pieces[0], torch.Tensor):
            raise AssertionError
        return input.map(lambda piece: function(piece, *args, **kwargs))

    return handler


def one_way(flow: Any, input: Any, *args: Any) -> Any:
    """A convolution that gets halos, but does not send their gradients back."""
    copied = input.map(lambda piece: piece.detach())
    right = TABLE[torch.conv2d](flow, copied, *args)
    wrong = alone(F.conv2d)(flow, input, *args)
    return wrong.like(
        [
            there.detach() + here - here.detach()
            for here, there in zip(wrong.pieces, right.pieces, strict=True)
        ]
    )


@pytest.mark.parametrize(
    ("layer", "wrong"),
    [
        (lambda: nn.Conv2d(3, 3, 3, padding=1), {torch.conv2d: alone(F.conv2d)}),
        (lambda: nn.Conv2d(3, 3, 3, padding=1), {torch.conv2d: one_way}),
        (lambda: nn.MaxPool2d(3, 1, 1), {F.max_pool2d: alone(F.max_pool2d)}),
        (lambda: nn.GroupNorm(1, 3), {F.group_norm: alone(F.group_norm)}),
        (lambda: nn.Dropout(0.5), {F.dropout: alone(F.dropout)}),
    ],
    ids=["no halo", "no gradient of the halo", "pool", "statistics", "mask"],
)
def test_a_wrong_rule_is_found(layer: Any, wrong: Any) -> None:
    check(made(layer), numbers(2, 3, 8, 6), (2, 2))
    with pytest.raises(AssertionError, match="relative error"):
        check(made(layer), numbers(2, 3, 8, 6), (2, 2), table={**TABLE, **wrong})

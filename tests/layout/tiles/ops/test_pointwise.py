"""What is computed for every pixel alone, what changes shapes, and what cannot be tiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farandole.errors import UserError
from farandole.layout.tiles.core.tile import Tile, cut
from tests.layout.tiles.checks import check, flow_of, made, numbers

SHAPE = (3, 4, 7, 5)
PLACES = [((2, 2), 1), ((3, 1), 2), ((1, 3), 3)]

ACTIVATIONS: list[Callable[[], nn.Module]] = [
    nn.CELU,
    nn.ELU,
    nn.GELU,
    nn.Hardshrink,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Hardtanh,
    nn.LeakyReLU,
    nn.LogSigmoid,
    nn.Mish,
    nn.PReLU,
    nn.ReLU,
    nn.ReLU6,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softmax2d,
    nn.Softplus,
    nn.Softshrink,
    nn.Softsign,
    nn.Tanh,
    nn.Tanhshrink,
    lambda: nn.CELU(inplace=True),
    lambda: nn.ELU(inplace=True),
    lambda: nn.GELU("tanh"),
    lambda: nn.GLU(1),
    lambda: nn.Hardsigmoid(inplace=True),
    lambda: nn.Hardswish(inplace=True),
    lambda: nn.Hardtanh(inplace=True),
    lambda: nn.LeakyReLU(inplace=True),
    lambda: nn.LogSoftmax(1),
    lambda: nn.Mish(inplace=True),
    lambda: nn.PReLU(4),
    lambda: nn.RReLU().eval(),
    lambda: nn.ReLU(inplace=True),
    lambda: nn.ReLU6(inplace=True),
    lambda: nn.SELU(inplace=True),
    lambda: nn.SiLU(inplace=True),
    lambda: nn.Softmax(1),
    lambda: nn.Softmin(1),
    lambda: nn.Threshold(0.1, 2.0),
    lambda: nn.Threshold(0.1, 2.0, inplace=True),
]


@pytest.mark.parametrize("build", ACTIVATIONS, ids=lambda build: repr(build()))
def test_activations(build: Callable[[], nn.Module]) -> None:
    for grid, parts in PLACES:
        check(made(build), numbers(*SHAPE), grid, parts)


def double(*shape: int) -> Tensor:
    return numbers(*shape, seed=3)


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "a number": lambda x: 2 ** (3 - x / 2) + x % 0.7,
    "a number in a tensor": lambda x: x * torch.tensor(2.0) + torch.ones(1, 1).double(),
    "a plain tensor": lambda x: x * double(4, 1, 1) + double(1, 1, 7, 5) - double(5),
    "a plain tensor of the batch": lambda x: double(3, 1, 1, 1) * x + double(*SHAPE),
    "a mean": lambda x: x - x.mean((2, 3), keepdim=True) * x.mean(1, keepdim=True),
    "two that are both broadcast": lambda x: x.mean(2, keepdim=True) + x[:, :, :, :1],
    "two rows": lambda x: x[:, :, :1] * x[:, :, :, 2:3],
    "comparisons": lambda x: (x > 0) & ~(x.abs() >= 1.0) | (x == 0),
    "where": lambda x: torch.where(x > 0, x, 0.5) + x.where(x < 0.2, torch.zeros_like(x)),
    "clamp": lambda x: x.clamp(min=double(4, 1, 1)).clamp(-1, 1),
    "masks": lambda x: x.masked_fill(x > 0.3, 2.0) * torch.ones_like(x),
    "two tensors": lambda x: torch.maximum(x, -x) + torch.max(x, x * x) + torch.lerp(x, x * x, 0.3),
    "types": lambda x: x.float().to(torch.ones(9).double()).type_as(double(2)) + x.double(),
    "in place": lambda x: x.add_(1).mul_(double(5)).clamp_(-2, 2),
    "operators in place": lambda x: x.__iadd__(double(4, 1, 1)).__imul__(x.detach().sigmoid()),
    "a new tensor": lambda x: x + x.new_ones(5),
    "slices": lambda x: x[:, 1:, ::2, -3:],
    "numbers and new axes": lambda x: x[:, 1, None, 2:, ..., -1],
    "all of it": lambda x: x[...] + x[:],
    "some samples": lambda x: x[1:],
    "split": lambda x: (*x.split([1, 3], 1), *x.chunk(3, 2), x.narrow(3, -2, 2)),
    "roll": lambda x: x.roll((2, -3), (2, 3)) + x.roll(1, 1),
    "flip": lambda x: x.flip(1, 3),
    "squeeze": lambda x: x[:, :, 3:4].squeeze(2) + x.sum(3).squeeze()[:, :, :1],
    "unsqueeze": lambda x: x.unsqueeze(-1) * x.unsqueeze(2).squeeze(2).unsqueeze(-1),
    "moved axes": lambda x: x.movedim(1, -1).transpose(-1, 1).permute(0, 1, 3, 2),
    "expand": lambda x: x.mean((2, 3), keepdim=True).expand(-1, -1, 7, 5) * x,
    "expand as": lambda x: x[:, :, :1].expand_as(x) * x,
    "views": lambda x: x.mean((2, 3)).view(3, 4, 1, 1) * x.reshape(3, 4, 7, 1, 5).flatten(3),
    "sums": lambda x: (x.sum(), x.mean(), x.sum(1), x.mean(-1), x.sum((1, 3), keepdim=True)),
    "variance": lambda x: (x.var((2, 3)), x.std(1), x.var((1, 2, 3), correction=0, keepdim=True)),
    "maxima of channels": lambda x: (*torch.max(x, 1), x.amax(1, keepdim=True), x.argmin(1)),
    "along channels": lambda x: x.cumsum(1) + F.normalize(x) + x.logsumexp(1, keepdim=True),
    "cat of channels": lambda x: torch.cat([x, x * x, x[:, :1]], 1),
    "cat of rows": lambda x: torch.cat([x, x * x, x[:, :, :1]], 2),
    "cat of samples": lambda x: torch.cat([x, x * x]),
    "cat with a plain tensor": lambda x: torch.cat([x, double(3, 1, 7, 5)], 1),
    "cat with a copy": lambda x: torch.cat([x, x.mean(2, keepdim=True) + double(7, 1)], 1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    for grid, parts in PLACES:
        check(FUNCTIONS[name], numbers(*SHAPE), grid, parts)


def test_shapes_that_keep_channels_apart() -> None:
    """As long as groups of channels stay together."""

    def shuffled(x: Tensor) -> Tensor:
        return x.view(3, 2, 2, 7, 5).mean(2) + x.unflatten(1, (2, -1)).flatten(1, 2)[:, ::2]

    check(shuffled, numbers(*SHAPE), (2, 2), 1)
    check(shuffled, numbers(*SHAPE), (2, 1), 2)


def attention(x: Tensor) -> Tensor:
    words = x.flatten(2).transpose(1, 2)
    layer = made(lambda: nn.MultiheadAttention(4, 2, batch_first=True))
    return layer(words, words, words)[0]


NEED_ALL: dict[str, Callable[[Tensor], Any]] = {
    "stack": lambda x: torch.stack([x, x]),
    "unfold": lambda x: F.unfold(x, 3),
    "max pool with indices": lambda x: F.max_pool2d(x, 2, return_indices=True),
    "adaptive pool with indices": lambda x: F.adaptive_max_pool2d(x, 2, return_indices=True),
    "matmul": lambda x: x @ x.transpose(2, 3),
    "matmul with a matrix": lambda x: torch.matmul(x, double(5, 2)),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "attention layer": attention,
    "grid sample": lambda x: F.grid_sample(x, double(3, 2, 2, 2).tanh(), align_corners=False),
    "bicubic": lambda x: F.interpolate(x, size=9, mode="bicubic"),
    "antialias": lambda x: F.interpolate(x, size=4, mode="bilinear", antialias=True),
    "flatten": lambda x: x.flatten(1),
    "one sample": lambda x: x[0],
    "a list of rows": lambda x: x[:, :, [0, 2]],
    "a mask": lambda x: x[x > 0],
    "where": lambda x: torch.where(x > 0)[0],
    "maximum of an image": lambda x: x.amax((2, 3)),
    "softmax of rows": lambda x: x.softmax(2),
    "sort": lambda x: x.sort(2)[0],
    "einsum": lambda x: torch.einsum("bchw->bwhc", x),
    "the batch elsewhere": lambda x: x.transpose(0, 1),
    "more axes": lambda x: x + double(2, 3, 4, 7, 5),
    "fewer axes": lambda x: x.mean((2, 3))[:, :1] * x[..., :3, :1],
    "an image turned over": lambda x: x[:, :, :5] + x.transpose(2, 3)[..., :5],
    "random slopes": lambda x: F.rrelu(x, training=True),
}


@pytest.mark.parametrize("name", NEED_ALL)
def test_what_needs_the_whole_image_is_handed_off(name: str) -> None:
    check(NEED_ALL[name], numbers(*SHAPE), (2, 2), hands_off=True)


def assign(x: Tensor) -> Tensor:
    x[:, :, 0] = 1.0
    return x


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "assignment": assign,
    "random": lambda x: x.uniform_(),
    "sorted away": lambda x: x.squeeze_(),
    "copy": lambda x: x.copy_(x * 2),
    "broadcast": lambda x: x[:, :, :1].add_(x),
    "plain": lambda x: torch.ones(SHAPE).double().add_(x),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_cannot_be_changed_in_place_says_so(name: str) -> None:
    flow, _ = flow_of((2, 2))
    flow.layer = "stem.3"
    with pytest.raises(UserError, match=r"stem\.3: .* in place"):
        CHANGES[name](cut(flow, numbers(*SHAPE), flow.grid.image_axes))


def test_errors_name_the_layer() -> None:
    flow, _ = flow_of((2, 2))
    flow.layer = "stem.3"
    x = cut(flow, numbers(*SHAPE), flow.grid.image_axes)
    with pytest.raises(UserError, match=r"stem\.3: tensors of shapes .*do not go together"):
        x + double(3, 1)
    with pytest.raises(UserError, match=r"stem\.3: .* out="):
        torch.add(x, x, out=double(*SHAPE))
    with pytest.raises(UserError, match=r"stem\.3: 4 channels .* 3 groups"):
        F.group_norm(x, 3)


def test_a_tile_looks_whole() -> None:
    flow, handed_off = flow_of((2, 2), 2)
    x = cut(flow, numbers(*SHAPE).requires_grad_(), flow.grid.image_axes)
    assert isinstance(x, Tile)
    assert (x.shape, x.dim(), x.size(2), x.dtype) == (SHAPE, 4, 7, torch.float64)
    assert x.requires_grad
    assert not x.detach().requires_grad
    assert x.is_contiguous()
    assert x.type() == "torch.DoubleTensor"
    assert (x > 0).dtype == torch.bool
    assert not handed_off


def test_a_slice_that_had_to_be_fetched_cannot_be_changed_in_place() -> None:
    """The tensor that it is a part of would not change with it."""

    class Shifted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 1
            x[:, :, 1:].add_(1)
            return x

    with pytest.raises(UserError, match="add_ cannot change a tensor on tiles in place"):
        check(Shifted(), torch.randn(2, 3, 7, 5, dtype=torch.float64), (2, 1))

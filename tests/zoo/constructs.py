"""What people write into the forward of a model: each takes a feature map and returns one.

`net` is the model, with layers and state that a construct may use; `x` is (samples, 4, 8, 8).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from tests.zoo.registry import CLASSES, conv

Construct = Callable[["Net", Tensor], Tensor]
CONSTRUCTS: dict[str, Construct] = {}
SIDE = 8


def construct(function: Construct) -> Construct:
    CONSTRUCTS[function.__name__] = function
    return function


class Net(nn.Module):
    """Convolutions, with constructs between them, and a head."""

    def __init__(self, first: list[str], second: list[str]) -> None:
        super().__init__()
        self.between = [[CONSTRUCTS[name] for name in names] for names in (first, second)]
        self.stem, self.body, self.shared = conv(3, 4), conv(4, 4), conv(4, 4)
        self.spectral = spectral_norm(conv(4, 4, 1))
        self.linear, self.norm, self.head = (
            nn.Linear(4, 4),
            nn.BatchNorm1d(4),
            nn.Linear(4, CLASSES),
        )
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.context, self.experts = (
            nn.Linear(4 * SIDE * SIDE, 4),
            nn.ModuleList([conv(4, 4, 1) for _ in range(2)]),
        )
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("count", torch.zeros(()))
        self.temperature, self.calls = 1.0, 0

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        for each in self.between[0]:
            x = each(self, x)
        x = torch.tanh(self.body(x))
        for each in self.between[1]:
            x = each(self, x)
        result: Tensor = self.head(x.mean((2, 3)))
        return result


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: int) -> Tensor:
        return (x * steps).round() / steps

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


@construct
def gradient_reversal(net: Net, x: Tensor) -> Tensor:
    return x + 0.5 * Reversed.apply(x)


@construct
def straight_through(net: Net, x: Tensor) -> Tensor:
    return Rounded.apply(x, 4)


@construct
def straight_through_by_detach(net: Net, x: Tensor) -> Tensor:
    return x + (x.round() - x).detach()


@construct
def mean_over_named_axis(net: Net, x: Tensor) -> Tensor:
    return x * x.mean(axis=1, keepdim=True)


@construct
def sum_with_numpys_names(net: Net, x: Tensor) -> Tensor:
    return x - 0.01 * x.sum(axis=(2, 3), keepdims=True)


@construct
def deviation_of_all(net: Net, x: Tensor) -> Tensor:
    return x / (x.std() + 1)


@construct
def variance_over_the_batch(net: Net, x: Tensor) -> Tensor:
    return x / (x.var((0, 2, 3), keepdim=True) + 1)


@construct
def variance_without_correction(net: Net, x: Tensor) -> Tensor:
    return x / torch.sqrt(x.var(dim=(2, 3), correction=0, keepdim=True) + 1)


@construct
def norm_of_all(net: Net, x: Tensor) -> Tensor:
    return x / (x.norm() + 1)


@construct
def largest_of_all(net: Net, x: Tensor) -> Tensor:
    return x / (x.abs().max() + 1)


@construct
def mean_of_some(net: Net, x: Tensor) -> Tensor:
    return x * (1 + x[x > 0].mean())


@construct
def hook(net: Net, x: Tensor) -> Tensor:
    x = x * 1.0
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 2)
    return x


@construct
def moving_average(net: Net, x: Tensor) -> Tensor:
    if net.training:
        net.average.mul_(0.9).add_(0.1 * x.detach().mean((0, 2, 3)))
    return x - net.average[:, None, None]


@construct
def counter_in_a_buffer(net: Net, x: Tensor) -> Tensor:
    net.count += 1
    return x / (1 + 0.1 * net.count)


@construct
def falling_temperature(net: Net, x: Tensor) -> Tensor:
    net.temperature *= 0.9
    return x / net.temperature


@construct
def every_other_call(net: Net, x: Tensor) -> Tensor:
    net.calls += 1
    return net.experts[net.calls % 2](x)


@construct
def mask(net: Net, x: Tensor) -> Tensor:
    return x.masked_fill(x < -0.5, 0.1)


@construct
def mask_by_the_mean(net: Net, x: Tensor) -> Tensor:
    return torch.where(x > x.mean(), x, 0.3 * x)


@construct
def expanded_constant(net: Net, x: Tensor) -> Tensor:
    return x + net.scale.view(1, 4, 1, 1).expand(x.shape[0], -1, x.shape[2], x.shape[3])


@construct
def repeated_constant(net: Net, x: Tensor) -> Tensor:
    return x * net.scale.view(1, 4, 1, 1).repeat(x.size(0), 1, 1, 1)


@construct
def positions(net: Net, x: Tensor) -> Tensor:
    rows = torch.arange(x.shape[2], dtype=x.dtype).view(1, 1, -1, 1)
    return x + 0.1 * torch.sin(rows)


@construct
def like_the_input(net: Net, x: Tensor) -> Tensor:
    return x + torch.ones_like(x) * 0.1 + x.new_full((x.shape[0], 1, 1, 1), 0.2)


@construct
def rows_of_tokens(net: Net, x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    tokens = net.linear(x.permute(0, 2, 3, 1).reshape(-1, c))
    return tokens.view(b, h, w, c).permute(0, 3, 1, 2)


@construct
def norm_over_tokens(net: Net, x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    tokens = net.norm(x.flatten(2).transpose(1, 2).reshape(b * h * w, c))
    return tokens.view(b, h * w, c).transpose(1, 2).reshape(b, c, h, w)


@construct
def channels_as_samples(net: Net, x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    pooled = F.max_pool2d(x.view(b * c, 1, h, w), 3, 1, 1)
    return pooled.view(b, c, h, w)


@construct
def there_and_back(net: Net, x: Tensor) -> Tensor:
    return torch.sigmoid(x.view(x.size(0), -1)).view(-1, 4, SIDE, SIDE)


@construct
def view_of_a_weight(net: Net, x: Tensor) -> Tensor:
    return x * (1 + net.shared.weight.view(4, -1).std(1).mean())


@construct
def standardised_weight(net: Net, x: Tensor) -> Tensor:
    weight = F.batch_norm(net.shared.weight.reshape(1, 4, -1), None, None, training=True)
    return F.conv2d(x, weight.reshape_as(net.shared.weight), padding=1)


@construct
def joined_branches(net: Net, x: Tensor) -> Tensor:
    return torch.cat([x[:, :2], torch.relu(net.shared(x))[:, 2:]], dim=1)


@construct
def context_of_all_pixels(net: Net, x: Tensor) -> Tensor:
    context = net.context(x.flatten(1))[:, :, None, None]
    return torch.cat([x, context.expand(-1, -1, x.shape[2], x.shape[3])], 1)[:, ::2]


@construct
def one_layer_twice(net: Net, x: Tensor) -> Tensor:
    return net.shared(torch.tanh(net.shared(x)))


@construct
def reentrant_checkpoint(net: Net, x: Tensor) -> Tensor:
    result: Tensor = checkpoint(net.shared, x, use_reentrant=True)
    return result


@construct
def plain_checkpoint(net: Net, x: Tensor) -> Tensor:
    result: Tensor = checkpoint(net.shared, x, use_reentrant=False)
    return result


@construct
def softmax_over_samples(net: Net, x: Tensor) -> Tensor:
    return x * F.softmax(x, dim=0)


@construct
def softmax_over_pixels(net: Net, x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    return x + F.softmax(x.view(b, c, -1), dim=-1).view(b, c, h, w)


@construct
def beside_the_first_sample(net: Net, x: Tensor) -> Tensor:
    return x - 0.1 * x[:1]


@construct
def samples_in_other_order(net: Net, x: Tensor) -> Tensor:
    return x + 0.1 * x.flip(0) + 0.1 * torch.roll(x, 1, 0)


@construct
def in_place(net: Net, x: Tensor) -> Tensor:
    x = x * 1.0
    x += 0.1
    return x.clamp_(min=-0.4)


@construct
def assigned_part(net: Net, x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 0] = 0.5
    return x


@construct
def without_gradient(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = 1 / (1 + x.abs().mean(1, keepdim=True))
    return x * scale


@construct
def spectral_layer(net: Net, x: Tensor) -> Tensor:
    result: Tensor = net.spectral(x)
    return result


@construct
def attention(net: Net, x: Tensor) -> Tensor:
    tokens = x.flatten(2).transpose(1, 2)
    found = F.scaled_dot_product_attention(net.linear(tokens), tokens, tokens)
    return x + found.transpose(1, 2).view_as(x)


@construct
def sampled_grid(net: Net, x: Tensor) -> Tensor:
    theta = torch.eye(2, 3, dtype=x.dtype).expand(x.shape[0], 2, 3) * 0.9
    return F.grid_sample(
        x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False
    )


@construct
def einsum_over_channels(net: Net, x: Tensor) -> Tensor:
    return torch.einsum("nchw,dc->ndhw", x, net.linear.weight)


@construct
def similar_samples(net: Net, x: Tensor) -> Tensor:
    flat = F.normalize(x.flatten(1), dim=1)
    return x * (1 + (flat @ flat.t()).mean(1))[:, None, None, None]


@construct
def patches(net: Net, x: Tensor) -> Tensor:
    folded = F.unfold(x, 2, stride=2)
    return F.fold(torch.tanh(folded), (SIDE, SIDE), 2, stride=2)


@construct
def largest_channels(net: Net, x: Tensor) -> Tensor:
    values, places = x.topk(2, dim=1)
    return x + torch.zeros_like(x).scatter(1, places, values)


CHANGING = frozenset(
    {
        "moving_average",
        "counter_in_a_buffer",
        "falling_temperature",
        "every_other_call",
        "spectral_layer",
    }
)
"""Those that change buffers or attributes in every forward."""

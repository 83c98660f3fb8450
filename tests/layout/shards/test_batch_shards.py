"""Behind the tiles every shard has a share of the samples: what is made of them is that of all.

Shards are in threads of their own, in double precision. A construct stands in the middle of a small
network, on tiles, or behind a layer that ends them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from farandole.errors import UserError
from tests.layout.tiles.checks import check_trained_apart, made, numbers

Inside = Callable[["Net", Tensor], Tensor]
SIZE = 6


class Net(nn.Module):
    """A convolution, a construct with its output, and a linear layer."""

    def __init__(self, inside: Inside) -> None:
        super().__init__()
        self.inside = inside
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.tokens = nn.Linear(4, 4)
        self.codes = nn.Embedding(5, 4)
        self.theta = nn.Linear(4, 6)
        self.scale = nn.Parameter(torch.ones(1, 4))
        self.head = nn.Linear(4 * SIZE * SIZE, 3)
        self.register_buffer("average", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside(self, self.first(x).tanh())
        result: Tensor = self.head(x.reshape(x.shape[0], -1))
        return result


def images(samples: int) -> tuple[Tensor, Tensor]:
    return numbers(samples, 2, SIZE, SIZE), torch.arange(samples) % 3


# On tiles


def weight_view(net: Net, x: Tensor) -> Tensor:
    return x * net.second.weight.view(4, -1).std(1).mean()


def standardised(net: Net, x: Tensor) -> Tensor:
    weight = net.second.weight
    flat = F.batch_norm(weight.reshape(1, 4, -1), None, None, training=True)
    return F.conv2d(x, flat.reshape_as(weight), padding=1)


def variance(net: Net, x: Tensor) -> Tensor:
    return x / (x.var((0, 2, 3))[:, None, None] + 1)


def corrected(net: Net, x: Tensor) -> Tensor:
    return x * x.var((0, 2, 3), correction=0, keepdim=True) + x.std(dim=(2, 3), keepdim=True)


def deviation(net: Net, x: Tensor) -> Tensor:
    return x / (x.std() + 1)


def magnitude(net: Net, x: Tensor) -> Tensor:
    return x / x.norm()


def largest(net: Net, x: Tensor) -> Tensor:
    return x / x.abs().max()


def picked(net: Net, x: Tensor) -> Tensor:
    return x * x[x > 0].mean()


def over_samples_alone(net: Net, x: Tensor) -> Tensor:
    return (x - x.mean(0)) / (x.var(0) + 1) * x.sum(0, keepdim=True)


def moving_average(net: Net, x: Tensor) -> Tensor:
    net.average.mul_(0.9).add_(x.detach().mean((0, 2, 3)))
    return x * net.average[:, None, None]


def reversed_samples(net: Net, x: Tensor) -> Tensor:
    return x + 0.5 * x.flip(0) * x.roll(1, 0)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return -gradients[0]


class Clipped(torch.autograd.Function):
    """Its backward is not linear: it needs the gradient of all shards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        gradient = gradients[0] / (1e-3 + gradients[0].norm())
        return gradient * weight.sum(), (gradient * x).sum() * torch.ones_like(weight)


clipped_apply = Clipped.apply  # kept from before any tiles


def reversal(net: Net, x: Tensor) -> Tensor:
    result: Tensor = Reversed.apply(x)
    return result


def clipping(net: Net, x: Tensor) -> Tensor:
    result: Tensor = clipped_apply(x, net.scale)
    return result


def checkpointed(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if not torch.is_grad_enabled():  # torch warns then
        return run(x)
    result: Tensor = checkpoint(run, x, use_reentrant=True)
    return result


def not_reentrant(net: Net, x: Tensor) -> Tensor:
    result: Tensor = checkpoint(
        lambda x: net.second(x).tanh(), x, use_reentrant=False, preserve_rng_state=False
    )
    return result


def reentrant(net: Net, x: Tensor) -> Tensor:
    return checkpointed(lambda x: net.second(x).tanh(), x)


# Behind the tiles


def tokens_of(x: Tensor) -> Tensor:
    """Every pixel a token. The tiles end, for images are flattened."""
    return x.flatten(1).view(x.shape[0], 4, -1).transpose(1, 2)


def images_of(tokens: Tensor) -> Tensor:
    return tokens.transpose(1, 2).unflatten(2, (SIZE, SIZE))


def token_norm(net: Net, x: Tensor) -> Tensor:
    tokens = tokens_of(x)
    flat = net.norm(tokens.reshape(-1, 4))
    return images_of(flat.view(tokens.shape))


def distributed(net: Net, x: Tensor) -> Tensor:
    tokens = tokens_of(x)
    count = tokens.shape[0] * tokens.shape[1]
    flat = net.tokens(tokens.reshape(count, 4)).softmax(-1)
    return images_of(flat.view(-1, SIZE * SIZE, 4))


def windows(net: Net, x: Tensor) -> Tensor:
    """As Swin's: parts of images become samples of their own, and attend among themselves."""
    batch = x.shape[0]
    parts = x.flatten(1).view(batch, 4, 2, 3, 2, 3).permute(0, 2, 4, 3, 5, 1).reshape(-1, 9, 4)
    parts = F.scaled_dot_product_attention(parts, net.tokens(parts), parts)
    back = parts.view(int(parts.shape[0] / 4), 2, 2, 3, 3, 4).permute(0, 5, 1, 3, 2, 4)
    return back.reshape(batch, 4, SIZE, SIZE)


def class_token(net: Net, x: Tensor) -> Tensor:
    tokens = tokens_of(x)
    first = net.scale[None].repeat(x.shape[0], 1, 1)
    other = net.scale[None].expand(x.shape[0], -1, -1)
    joined = torch.cat([first, tokens, other * 2], 1)
    scores = torch.einsum("bic,bjc->bij", joined, joined).softmax(-1)
    return images_of((scores @ joined)[:, 1:-1])


def quantised(net: Net, x: Tensor) -> Tensor:
    """As a VQ-VAE's: the nearest code for every token."""
    flat = tokens_of(x).reshape(-1, 4)
    codes = net.codes.weight
    apart = flat.square().sum(1, keepdim=True) - 2 * flat @ codes.t() + codes.square().sum(1)
    nearest = apart.argmin(1)
    used = torch.zeros(len(nearest), 5, dtype=x.dtype).scatter_(1, nearest[:, None], 1.0)
    found = net.codes(nearest) * (1 + used.mean(0).std())
    result = flat + (found - flat).detach() + 0.1 * found
    return images_of(result.view(x.shape[0], -1, 4))


def warped(net: Net, x: Tensor) -> Tensor:
    theta = net.theta(x.mean((2, 3))).view(-1, 2, 3)
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def joined_branch(net: Net, x: Tensor) -> Tensor:
    branch = images_of(net.tokens(tokens_of(x)))
    return torch.cat([x, branch], 1)[:, 2:6] * x


def over_samples(net: Net, x: Tensor) -> Tensor:
    tokens = tokens_of(x)
    tokens = (tokens - tokens.mean(0)) / (tokens.var(0) + 1)
    tokens = tokens / tokens.abs().max() * tokens[tokens > 0].mean()
    return images_of(tokens + tokens.flip(0) * torch.linalg.norm(tokens))


def sequence_first(net: Net, x: Tensor) -> Tensor:
    tokens = tokens_of(x).permute(1, 0, 2)  # as nn.MultiheadAttention has them
    return images_of(net.tokens(tokens).transpose(0, 1))


def recurrent(net: Net, x: Tensor) -> Tensor:
    tokens = tokens_of(x)
    weights = [net.tokens.weight, net.tokens.weight * 0.5, net.tokens.bias, net.tokens.bias]
    zeros = torch.zeros(1, x.shape[0], 4, dtype=x.dtype)
    found, _ = torch.rnn_tanh(tokens, zeros, weights, True, 1, 0.0, True, False, True)
    return images_of(found)


def in_place(net: Net, x: Tensor) -> Tensor:
    tokens = net.tokens(tokens_of(x))
    tokens[:, 0] = 0.5
    tokens[:, 1] = tokens[:, 2] * 2
    tokens.mul_(2).add_(tokens.detach().mean(0))
    return images_of(F.relu(tokens, inplace=True))


def reversed_behind(net: Net, x: Tensor) -> Tensor:
    result: Tensor = images_of(clipped_apply(Reversed.apply(tokens_of(x)), net.scale))
    return result


def reentrant_behind(net: Net, x: Tensor) -> Tensor:
    return images_of(checkpointed(lambda x: net.tokens(x).tanh(), tokens_of(x)))


def first_sample(net: Net, x: Tensor) -> Tensor:
    tokens = tokens_of(x)
    return images_of(tokens + tokens[0] - tokens[-1:].sum() + torch.stack(list(tokens)).mean(0))


ON_TILES = (
    weight_view,
    standardised,
    variance,
    corrected,
    deviation,
    magnitude,
    largest,
    picked,
    over_samples_alone,
    moving_average,
    reversed_samples,
    reversal,
    clipping,
    reentrant,
    not_reentrant,
)
BEHIND = (
    token_norm,
    distributed,
    windows,
    class_token,
    quantised,
    warped,
    joined_branch,
    over_samples,
    sequence_first,
    recurrent,
    in_place,
    reversed_behind,
    reentrant_behind,
    first_sample,
)


@pytest.mark.parametrize(("grid", "samples"), [((2, 1), 5), ((2, 2), 3), ((2, 1), 4)])
@pytest.mark.parametrize("inside", [*ON_TILES, *BEHIND])
def test_a_construct(inside: Inside, grid: tuple[int, int], samples: int) -> None:
    check_trained_apart(made(lambda: Net(inside)), *images(samples), F.cross_entropy, grid)


@pytest.mark.parametrize("inside", [deviation, token_norm, class_token, over_samples, clipping])
def test_divided_channels(inside: Inside) -> None:
    model = made(lambda: Net(inside))
    check_trained_apart(model, *images(3), F.cross_entropy, (1, 2), channels=2)


def hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient * 2)
    return x


def resized(x: Tensor) -> Tensor:
    x.requires_grad_()
    return x


def replaced(x: Tensor) -> Tensor:
    x.data = x.detach() * 2
    return x


def strided(x: Tensor) -> Tensor:
    return x + x.stride(0)


def filled(x: Tensor) -> Tensor:
    return x.exponential_()


def kept_gradient(x: Tensor) -> Tensor:
    x.retain_grad()
    return x


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize(
    ("construct", "name"),
    [
        (hooked, "register_hook"),
        (resized, "requires_grad_"),
        (replaced, "data"),
        (strided, "stride"),
        (filled, "exponential_"),
        (kept_gradient, "retain_grad"),
    ],
)
def test_what_reaches_a_tensor_from_outside_is_refused(
    construct: Callable[[Tensor], Tensor], name: str, behind: bool
) -> None:
    def inside(net: Net, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return x
        return images_of(construct(tokens_of(x) * 2)) if behind else construct(x * 2)

    model = made(lambda: Net(inside))
    with pytest.raises(UserError, match=rf"the model's own forward: {name} "):
        check_trained_apart(model, *images(3), F.cross_entropy, (2, 1))


def changed_view(net: Net, x: Tensor) -> Tensor:
    tokens = tokens_of(x)
    tokens.tanh_()
    return images_of(tokens)


def changed_view_of_new(net: Net, x: Tensor) -> Tensor:
    return changed_view(net, x * 1)


def changed_first_sample(net: Net, x: Tensor) -> Tensor:
    tokens = tokens_of(x) * 1
    first = tokens[0]
    first.tanh_()
    return x * first.sum()


@pytest.mark.parametrize("inside", [changed_view_of_new, changed_first_sample])
def test_a_view_may_be_changed_if_nobody_looks_at_the_original(inside: Inside) -> None:
    check_trained_apart(made(lambda: Net(inside)), *images(3), F.cross_entropy, (2, 1))


@pytest.mark.parametrize("first_sample", [False, True])
def test_or_it_is_refused(first_sample: bool) -> None:
    def again(net: Net, x: Tensor) -> Tensor:
        if not first_sample:
            x = x * 1
            return changed_view(net, x) + x
        tokens = tokens_of(x) * 1
        tokens[0].tanh_()
        return images_of(tokens)

    with pytest.raises(UserError, match="tanh_ has changed a tensor in place that is a view"):
        check_trained_apart(made(lambda: Net(again)), *images(3), F.cross_entropy, (2, 1))


class Telling(nn.Module):
    """Returns a number, a vector of weights and something of each token beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(token_norm)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scores = self.net(x)
        flat = scores[:, None].expand(-1, 2, -1).reshape(-1, 3)
        return {
            "scores": scores,
            "size": scores.square().mean() * self.net.scale.sum(),
            "weights": self.net.scale * 2,
            "tokens": flat,
        }


@pytest.mark.parametrize("samples", [1, 5])
def test_outputs_of_every_kind(samples: int) -> None:
    def loss(found: dict[str, Tensor], wanted: Tensor) -> Tensor:
        every_two = (found["tokens"][:, None] - found["tokens"]).square().sum()
        rest = found["size"] * found["weights"].sum()
        return F.cross_entropy(found["scores"], wanted) + every_two + rest

    check_trained_apart(made(Telling), *images(samples), loss, (2, 1))


def test_where_tiles_end_and_what_is_computed_whole_is_known() -> None:
    tilings = check_trained_apart(made(lambda: Net(deviation)), *images(3), F.cross_entropy, (2, 1))
    for tiling in tilings:
        assert tiling.handed_off_at == "the model's own forward (reshape)"
        assert tiling.replicated_at == ["the model's own forward (var)"]
    (tiling, _) = check_trained_apart(
        made(lambda: Net(largest)), *images(3), F.cross_entropy, (2, 1)
    )
    assert tiling.replicated_at == ["the model's own forward (max)"]

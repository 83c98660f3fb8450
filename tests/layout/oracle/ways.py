"""The ways to compute a call: plain, on tiles, on channels. All give the same, or refuse.

All lanes are in this process. Which tensors are cut is a part of the way: the first argument alone,
or every tensor that looks like a batch of as many samples, weights too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from farandole.layout.tiles.grid import Axes
from farandole.layout.tiles.tile import Flow, Tile, cut
from tests.layout.oracle.database import Given, is_batch
from tests.layout.tiles.checks import SEED, flow_of, numbers, whole


class Found(NamedTuple):
    """What a call has done."""

    results: list[Any]
    gradients: list[Tensor | None]  # of all tensors that were given
    after: list[Tensor]  # what was given, after the call
    handed_off: list[str]  # functions that were computed whole


class Way(NamedTuple):
    """A grid, and what divides a tensor of some dimensions."""

    name: str
    tiles: tuple[int, ...]
    channels: int
    axes: Callable[[int], Axes]
    together: bool = False  # whether all tensors that may be batches are cut

    def __call__(self, call: Callable[..., Any], given: Given) -> Found:
        flow, handed_off = flow_of(self.tiles, self.channels)
        flow.layer = "the layer"
        return _run(call, given, lambda tensors: self._cut(flow, tensors), handed_off)

    def _cut(self, flow: Flow, tensors: list[Tensor]) -> list[Tensor]:
        first = tensors[0]
        return [
            cut(flow, each, self.axes(each.dim() - 1))
            if at == 0 or (self.together and is_batch(each) and each.shape[0] == first.shape[0])
            else each
            for at, each in enumerate(tensors)
        ]


def plain(call: Callable[..., Any], given: Given) -> Found:
    return _run(call, given, lambda tensors: tensors, [])


def _last(count: int) -> Axes:
    """The image is what comes last."""
    image: Axes = (1, 2) if count > 1 else (2,)
    return (*(None,) * (count - len(image)), *image)


WAYS = (
    Way("tiles", (2, 2), 1, _last),
    Way("tiles", (2, 2), 1, _last, together=True),
    Way("tiles", (1, 3), 1, lambda count: (None,) * count),
    Way("channels", (), 2, lambda count: (0, *(None,) * (count - 1))),
    Way("channels", (), 2, lambda count: (0, *(None,) * (count - 1)), together=True),
)


def _run(
    call: Callable[..., Any],
    given: Given,
    divide: Callable[[list[Tensor]], list[Tensor]],
    handed_off: list[str],
) -> Found:
    flat, spec = pytree.tree_flatten(tuple(given))
    places = [at for at, each in enumerate(flat) if isinstance(each, Tensor)]
    leaves = [flat[at].detach().clone().requires_grad_(flat[at].requires_grad) for at in places]
    # Clones, for a leaf cannot be changed in place.
    arguments = divide([leaf.clone() for leaf in leaves])
    for at, argument in zip(places, arguments, strict=True):
        flat[at] = argument
    args, kwargs = pytree.tree_unflatten(flat, spec)
    torch.manual_seed(SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = [_whole(each) for each in pytree.tree_leaves(call(*args, **kwargs))]
        after = [_whole(each) for each in arguments]
        _backward(results)
    return Found(results, [leaf.grad for leaf in leaves], after, handed_off)


def _whole(leaf: Any) -> Any:
    if not isinstance(leaf, Tile):
        return leaf
    (result,) = whole(leaf)
    assert result.shape == leaf.shape, f"a tile of {leaf.shape} is in truth {result.shape}"
    return result


def _backward(results: list[Any]) -> None:
    differentiable = [each for each in results if isinstance(each, Tensor) and each.requires_grad]
    if differentiable:
        torch.autograd.backward(
            differentiable,
            [
                numbers(*each.shape, seed=at).to(each.dtype)
                for at, each in enumerate(differentiable, start=7)
            ],
        )

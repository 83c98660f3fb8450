"""One call: fresh arguments for it, what it has found, and what is sent back through it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from tests.layout.oracle.database import Given
from tests.layout.tiles.checks import SEED, numbers


class Found(NamedTuple):
    """What a call has done."""

    results: list[Any]
    gradients: list[Tensor | None]  # of all tensors that were given
    after: list[Tensor]  # what was given, after the call
    whole: list[str]  # functions that were computed whole


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def arguments_of(
    given: Given,
) -> tuple[list[Tensor], list[Tensor], Callable[[Sequence[Tensor]], Arguments]]:
    """Fresh leaves; tensors made of them, for a leaf cannot be changed in place; and the arguments
    with other tensors in their places."""
    flat, spec = pytree.tree_flatten(tuple(given))
    places = [at for at, each in enumerate(flat) if isinstance(each, Tensor)]
    leaves = [flat[at].detach().clone().requires_grad_(flat[at].requires_grad) for at in places]

    def fill(tensors: Sequence[Tensor]) -> Arguments:
        filled = list(flat)
        for at, tensor in zip(places, tensors, strict=True):
            filled[at] = tensor
        args, kwargs = pytree.tree_unflatten(filled, spec)
        return args, kwargs

    return leaves, [leaf.clone() for leaf in leaves], fill


def gradients_for(results: Sequence[Tensor]) -> list[Tensor]:
    """What comes back to each of them: always the same numbers."""
    return [numbers(*each.shape, seed=at).to(each.dtype) for at, each in enumerate(results, 7)]


def plain(call: Callable[..., Any], given: Given) -> Found:
    """As torch computes it."""
    return run(call, given, list, lambda each: each, [])


def run(
    call: Callable[..., Any],
    given: Given,
    divide: Callable[[list[Tensor]], list[Tensor]],
    full_tensor: Callable[[Any], Any],
    whole: list[str],
) -> Found:
    """A call of tensors that were divided, with the whole of all that comes of it."""
    leaves, arguments, fill = arguments_of(given)
    arguments = divide(arguments)
    args, kwargs = fill(arguments)
    torch.manual_seed(SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = [full_tensor(each) for each in pytree.tree_leaves(call(*args, **kwargs))]
        after = [full_tensor(each) for each in arguments]
        ends = [each for each in results if isinstance(each, Tensor) and each.requires_grad]
        if ends:
            torch.autograd.backward(ends, gradients_for(ends))
    return Found(results, [leaf.grad for leaf in leaves], after, whole)

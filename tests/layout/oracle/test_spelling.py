"""However a call is spelled, tiles give what the plain tensor gives; what is unknown is not lost.

Hypothesis spells calls of reductions and of functions of shapes: as methods and as functions, with
names, aliases as in numpy, numbers in a row, tuples and negative dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from farandole.errors import UserError
from farandole.layout.tiles.core.tile import cut
from tests.layout.oracle.database import Given
from tests.layout.oracle.verdicts import expected, verdict
from tests.layout.oracle.ways import WAYS
from tests.layout.tiles.checks import check, flow_of, numbers

SHAPE = (2, 4, 6, 5)
REDUCTIONS = ("sum", "mean", "var", "std", "amax", "amin", "argmax", "logsumexp", "max")
dims = st.integers(-5, 5)  # the ends are out of range
many = st.lists(st.integers(-4, 3), min_size=1, max_size=4).map(tuple)


def _spelled(draw: Any, name: str, arguments: dict[str, Any]) -> tuple[Callable[..., Any], Given]:
    """A method or a function, with some arguments by their names and the others in order."""
    method = draw(st.booleans())
    function = getattr(Tensor if method else torch, name)
    in_order = draw(st.integers(0, len(arguments)))
    values = list(arguments.values())[:in_order]
    named = dict(list(arguments.items())[in_order:])
    for alias, own in (("axis", "dim"), ("keepdims", "keepdim")):
        if own in named and draw(st.booleans()):
            named[alias] = named.pop(own)
    image = numbers(*SHAPE).requires_grad_()
    if not method and not values and draw(st.booleans()):
        return function, Given((), {"input": image, **named})
    return function, Given((image, *values), named)


@st.composite
def reductions(draw: Any) -> tuple[Callable[..., Any], Given]:
    arguments: dict[str, Any] = {}
    if draw(st.booleans()):
        arguments["dim"] = draw(dims | many)
        if draw(st.booleans()):
            arguments["keepdim"] = draw(st.booleans())
    name = draw(st.sampled_from(REDUCTIONS))
    function, called = _spelled(draw, name, arguments)
    extra = draw(
        st.sampled_from([{}, {}, {"dtype": torch.float64}, {"correction": 0}, {"where": True}])
    )
    return function, Given(called.args, {**called.kwargs, **extra})


@st.composite
def shapes(draw: Any) -> tuple[Callable[..., Any], Given]:
    image = numbers(*SHAPE).requires_grad_()
    order = draw(st.permutations([1, 2, 3]))
    name, rest = draw(
        st.sampled_from(
            [
                ("permute", (0, *order)),
                ("view", (2, 4, -1)),
                ("reshape", (2, 2, 2, 6, 5)),
                ("reshape", (-1, 4, 30)),
                ("expand", (2, -1, 6, 5)),
                ("flip", tuple(order[:2])),
                ("squeeze", (1, 2)),
            ]
        )
    )
    form = draw(st.sampled_from(["row", "tuple", "list", "named"]))
    if form == "row":
        return getattr(Tensor, name), Given((image, *rest), {})
    if form == "named":
        key = {"permute": "dims", "flip": "dims", "squeeze": "dim"}.get(name, "shape")
        key = "size" if name in ("view", "expand") else key
        return getattr(torch, name, getattr(Tensor, name)), Given((image,), {key: rest})
    values = rest if form == "tuple" else list(rest)
    return getattr(Tensor, name), Given((image, values), {})


@settings(max_examples=120)
@given(reductions() | shapes())
def test_every_spelling_gives_what_the_plain_call_gives(
    spelled: tuple[Callable[..., Any], Given],
) -> None:
    function, called = spelled
    true = expected(function, called)
    for way in WAYS:
        if way.name != "shares" and not way.together:
            verdict(function, called, way, true, {function.__name__})


CALLS: dict[str, Callable[[Tensor], Any]] = {
    "axis": lambda x: x.mean(axis=1, keepdim=True),
    "axis and keepdims": lambda x: x.sum(axis=(1, 3), keepdims=True),
    "in order": lambda x: x.mean((2, 3), True),
    "named input": lambda x: torch.sum(input=x, dim=1),
    "x1 and x2": lambda x: torch.add(x, other=x) + torch.mul(input=x, other=x),
    "normalize": lambda x: F.normalize(x, 2.0, 1) + F.normalize(x, p=1, dim=1),
    "flip": lambda x: torch.flip(x, dims=[3]) + x.flip(3),
    "positional loss": lambda x: F.mse_loss(x, x * 2, None, None, "sum"),
    "split": lambda x: torch.split(tensor=x, split_size_or_sections=2, dim=1),
    "correction": lambda x: x.var((2, 3), correction=0) + x.std((2, 3), unbiased=False),
}


@pytest.mark.parametrize("name", CALLS)
def test_spellings_that_are_computed_on_tiles(name: str) -> None:
    check(CALLS[name], numbers(*SHAPE), (2, 2))


def test_a_result_is_not_written_elsewhere() -> None:
    flow, _ = flow_of((2, 2))
    flow.layer = "stem.3"
    x = cut(flow, numbers(*SHAPE), flow.grid.image_axes)
    with pytest.raises(UserError, match=r"stem\.3: sum .* out="):
        torch.sum(x, 1, out=numbers(2, 6, 5))
    with pytest.raises(UserError, match=r"stem\.3: cat .* out="):
        torch.cat([x, x], 1, out=numbers(2, 8, 6, 5))

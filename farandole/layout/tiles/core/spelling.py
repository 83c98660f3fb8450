"""One spelling of a call, and only calls that a handler understands.

Torch takes `x.mean(1, True)`, `x.mean(axis=1, keepdims=True)` and `torch.mean(input=x, dim=[1],
keepdim=True)` for the same. A handler has one signature, and this signature says what it
understands: the names of its arguments and, by their annotations, what may be passed. Before it is
called, aliases become those names and numbers in a row become a tuple. A call that does not fit is
not the handler's: it is computed whole, by torch itself, which also refuses what makes no sense.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from farandole.errors import UserError
from farandole.layout.tiles.core.flow import Flow, Handler
from farandole.layout.tiles.core.tile import Tile

_ALIASES = {
    "axis": "dim",
    "keepdims": "keepdim",
    "self": "input",
    "x": "input",
    "a": "input",
    "x1": "input",
    "x2": "other",
    "tensor": "input",
    "size": "shape",
    "dims": "dim",
    "train": "training",
    "split_size_or_sections": "split_size",
}
"""Other names that torch has for an argument, in one of its functions or as numpy does."""

_IN_A_ROW = {
    Tensor.expand,
    Tensor.flip,
    Tensor.permute,
    Tensor.reshape,
    Tensor.squeeze,
    Tensor.view,
}
"""Methods that take several numbers for one argument: `x.permute(0, 2, 1)`."""

_FIRST = ("input", "self", "x", "x1", "a")


def _is_int(value: Any) -> bool:
    return type(value) is int


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, Tile)


def _are_ints(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(type(each) is int for each in value)


_KINDS: Mapping[str, Callable[[Any], bool]] = {
    "Tile": lambda value: isinstance(value, Tile),
    "Tensor": _is_plain,
    "torch.Tensor": _is_plain,
    "bool": lambda value: type(value) is bool,
    "int": _is_int,
    "float": _is_number,
    "str": lambda value: isinstance(value, str),
    "None": lambda value: value is None,
    "Sequence[int]": _are_ints,
    "torch.dtype": lambda value: isinstance(value, torch.dtype),
}
"""What an annotation lets pass. A tensor is a plain one: a weight that is a tile is unknown."""


def strict(function: Any, handler: Handler) -> Handler:
    """A handler that is called with what it understands, in its own spelling; `flow.otherwise` has
    all other calls of the function."""
    parameters = list(inspect.signature(handler).parameters.values())[1:]  # without the flow
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return _passing_on(function, handler, parameters)
    positional = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    checks = {each.name: _check(each.annotation) for each in parameters}
    required = [each.name for each in parameters if each.default is each.empty]
    in_a_row = function in _IN_A_ROW

    def call(flow: Flow, *args: Any, **kwargs: Any) -> Any:
        named = dict(zip(positional, args, strict=False))
        known = True
        if len(args) > len(positional) or (in_a_row and len(args) == 2):
            known = in_a_row
            named[positional[1]] = _row(args[1:])
        for name, value in kwargs.items():
            if name == "out" and "out" not in checks:
                if value is not None:
                    _refuse_out(flow, function)
                continue
            own = name if name in checks else _ALIASES.get(name, name)
            known = known and own in checks and own not in named
            named[own] = value
        # An unknown spelling is never an error here: torch itself computes or refuses it.
        if not known or not all(name in named for name in required):
            return flow.otherwise(flow, function, args, kwargs)
        for name, value in named.items():
            check = checks[name]
            if check is not None and not check(value):
                return flow.otherwise(flow, function, args, kwargs)
        return handler(flow, **named)

    return call


def _passing_on(
    function: Any, handler: Handler, parameters: Sequence[inspect.Parameter]
) -> Handler:
    """For a handler that passes on to torch, piece by piece, whatever it was called with."""
    first = parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL

    def call(flow: Flow, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if kwargs.get("out") is not None:
                _refuse_out(flow, function)
            for alias, name in (("axis", "dim"), ("keepdims", "keepdim")):
                if alias in kwargs and name not in kwargs:
                    kwargs[name] = kwargs.pop(alias)
            given = next((name for name in _FIRST if name in kwargs), None)
            if first and not args and given is not None:
                args = (kwargs.pop(given),)
        return handler(flow, *args, **kwargs)

    return call


def _row(rest: tuple[Any, ...]) -> Any:
    """The numbers that stand in a row, or the one thing that stands there instead."""
    return rest if len(rest) > 1 or isinstance(rest[0], int) else rest[0]


def _check(annotation: Any) -> Callable[[Any], bool] | None:
    """Of an annotation as it is written; None: anything may be passed."""
    parts = [part.strip() for part in str(annotation).split("|")]
    kinds = [_KINDS.get(part) for part in parts]
    if None in kinds:
        return None
    if len(kinds) == 1:
        return kinds[0]
    return lambda value: any(kind(value) for kind in kinds if kind is not None)


def _refuse_out(flow: Flow, function: Any) -> None:
    name = getattr(function, "__name__", str(function))
    raise UserError(f"{flow.layer}: {name} of tiles makes a tile; leave out= away.")


def position(dim: int, count: int) -> int:
    """A dimension counted from the front, of as many as there are; refused as torch does."""
    if not -count <= dim < count:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-count}, {count - 1}], but got "
            f"{dim})"
        )
    return dim % count


def positions(dims: int | Sequence[int] | None, count: int) -> tuple[int, ...]:
    """An argument `dim` counted from the front; none, or an empty one, is all."""
    if dims is None or dims == () or dims == []:
        return tuple(range(count))
    found = tuple(position(dim, count) for dim in ([dims] if isinstance(dims, int) else dims))
    if len(set(found)) < len(found):
        raise RuntimeError(f"a dimension appears multiple times in the list of dims {dims}")
    return found

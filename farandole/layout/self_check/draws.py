"""Random draws replaced by their expected values, so that two computations can be compared.

A layout draws its random numbers per block and micro-batch, and the plain model draws its own.
Under this mode both compute with the mean of every distribution instead. Dropout then keeps
everything, and noise is constant; the code around them still runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_Bound = dict[str, Any]
"""The arguments of a call by the names in its schema, with defaults filled in."""


class UnknownDrawError(Exception):
    """An operator draws random numbers in a way that has no expected value here."""


class ExpectedDraws(TorchDispatchMode):
    """Raises `UnknownDrawError` for a random operator that it does not know."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # Torch marks every operator that draws from a generator with this tag, so an unknown one is
        # refused instead of overlooked.
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        bound = _bound(func, args, kwargs)
        name = func._schema.name.removeprefix("aten::")
        if name in _FILLED:
            return bound["self"].fill_(_FILLED[name](bound))
        if name in _MADE:
            return _MADE[name](bound)
        if "dropout_p" in bound:  # attention: without dropout it draws nothing
            return func(**{**bound, "dropout_p": 0.0})
        raise UnknownDrawError(str(func))


def _bound(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Bound:
    schema = func._schema.arguments
    bound: _Bound = {}
    for index, argument in enumerate(schema):
        if index < len(args):
            bound[argument.name] = args[index]
        elif argument.name in kwargs:
            bound[argument.name] = kwargs[argument.name]
        elif argument.has_default_value() and argument.name != "dtype":  # a number, in a schema
            bound[argument.name] = argument.default_value
    return bound


def _middle(low: float, high: float) -> int:
    return int(low + high - 1) // 2


_FILLED: dict[str, Callable[[_Bound], Any]] = {
    "normal_": lambda bound: bound["mean"],
    "uniform_": lambda bound: (bound["from"] + bound["to"]) / 2,
    "exponential_": lambda bound: 1 / bound["lambd"],
}
"""Operators that fill a tensor in place, and with what."""


def _bernoulli_in_place(bound: _Bound) -> torch.Tensor:
    target: torch.Tensor = bound["self"]
    p = bound["p"]
    return target.copy_(p) if isinstance(p, torch.Tensor) else target.fill_(p)


def _bernoulli(bound: _Bound) -> torch.Tensor:
    given: torch.Tensor = bound["self"]
    return torch.full_like(given, bound["p"]) if "p" in bound else given.clone()


def _native_dropout(bound: _Bound) -> tuple[torch.Tensor, torch.Tensor]:
    given: torch.Tensor = bound["input"]
    return given.clone(), torch.ones_like(given, dtype=torch.bool)


def _layout_of(bound: _Bound) -> dict[str, Any]:
    return {key: bound.get(key) for key in ("dtype", "layout", "device", "pin_memory")}


def _full(bound: _Bound, value: float) -> torch.Tensor:
    if "self" in bound:
        return torch.full_like(bound["self"], value, dtype=bound.get("dtype"))
    options = _layout_of(bound)
    if options["dtype"] is None:
        options["dtype"] = torch.int64 if isinstance(value, int) else torch.get_default_dtype()
    return torch.full(bound["size"], value, **options)


def _normal(bound: _Bound) -> torch.Tensor:
    mean, std = bound["mean"], bound["std"]
    if isinstance(mean, torch.Tensor):
        return mean.clone()
    if isinstance(std, torch.Tensor):
        return torch.full_like(std, mean)
    raise UnknownDrawError("aten.normal of two numbers")


_MADE: dict[str, Callable[[_Bound], Any]] = {
    "bernoulli": _bernoulli,
    "bernoulli_": _bernoulli_in_place,
    "native_dropout": _native_dropout,
    "normal": _normal,
    "rand": lambda bound: _full(bound, 0.5),
    "rand_like": lambda bound: _full(bound, 0.5),
    "randn": lambda bound: _full(bound, 0.0),
    "randn_like": lambda bound: _full(bound, 0.0),
    "randint": lambda bound: _full(bound, _middle(bound.get("low", 0), bound["high"])),
    "randint_like": lambda bound: _full(bound, _middle(bound.get("low", 0), bound["high"])),
}
"""Operators that make a tensor, or fill one in their own way."""

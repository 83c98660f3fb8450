"""Numbers of a recording: sizes of tensors, and what a model's code computes from them.

`b, t = x.shape` gives two of them while a model is recorded. Each knows its value for the sample
and the operation that finds it for any other batch. So `x.view(b * t, -1)` and `torch.arange(t)`
are recorded as they are written. Code that needs the value itself, as `assert t <= 1024`, `if` and
`range(t)` do, gets the sample's, and a check is recorded that it is the same in every batch.

They are kinds of torch's own symbolic numbers, for only those may be arguments of its functions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import fx

_BINARY = ("add", "sub", "mul", "floordiv", "mod", "truediv", "pow")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")

T = TypeVar("T")


class NumberRecorder(Protocol):
    """Who writes down what is done with numbers."""

    def operation(self, function: Callable[..., Any], *arguments: Any) -> fx.Node:
        """An operation on numbers."""
        ...

    def require(self, node: fx.Node, value: Any) -> None:
        """From here on, only batches for which `node` has this value are like the sample."""
        ...


def _binary(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    function = getattr(operator, name)

    def forward(self: Any, other: Any) -> Any:
        return self._computed(function, self, other) if _is_number(other) else NotImplemented

    def reflected(self: Any, other: Any) -> Any:
        return self._computed(function, other, self) if _is_number(other) else NotImplemented

    return forward, reflected


def _comparison(name: str) -> Callable[..., Any]:
    function = getattr(operator, name)

    def compare(self: Any, other: Any) -> Any:
        return self._compared(function, other) if _is_number(other) else NotImplemented

    return compare


def _with_operators(kind: type[T]) -> type[T]:
    """Adds `a + b`, `b + a`, `a <= b` and their like."""
    for name in _BINARY:
        forward, reflected = _binary(name)
        setattr(kind, f"__{name}__", forward)
        setattr(kind, f"__r{name}__", reflected)
    for name in _COMPARISONS:
        setattr(kind, f"__{name}__", _comparison(name))
    return kind


@_with_operators
class Symbol:
    """A number with the value that it has for the sample."""

    def __init__(self, value: Any, recorded: fx.Node, recorder: NumberRecorder) -> None:
        self.value = value
        self.recorded = recorded
        self._recorder = recorder

    def fixed(self) -> Any:
        """The value itself: the recording is then of batches with this value only."""
        # Invariant: whatever Python code did with a plain number was recorded as a requirement. A
        # batch with another number is refused, not computed wrongly.
        self._recorder.require(self.recorded, self.value)
        return self.value

    def _computed(self, function: Callable[..., Any], *arguments: Any) -> Any:
        value = function(*(plain(each) for each in arguments))
        return symbol(value, self._recorder.operation(function, *arguments), self._recorder)

    def _compared(self, function: Callable[..., Any], other: Any) -> Any:
        value = function(self.value, plain(other))
        self._recorder.require(self._recorder.operation(function, self, other), value)
        return value

    def __neg__(self) -> Any:
        return self._computed(operator.neg, self)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return self._computed(abs, self)

    def __bool__(self) -> bool:
        return self._compared(operator.ne, 0) is True

    def __int__(self) -> int:
        return int(self.fixed())

    __trunc__ = __int__

    def __float__(self) -> float:
        return float(self.fixed())

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.fixed(), digits)

    def __floor__(self) -> int:
        return int(self.fixed() // 1)

    def __ceil__(self) -> int:
        return -int(-self.fixed() // 1)

    def __hash__(self) -> int:
        return hash(self.fixed())

    def __repr__(self) -> str:
        return repr(self.fixed())

    __str__ = __repr__

    def __format__(self, how: str) -> str:
        return format(self.fixed(), how)


class Integer(Symbol, torch.SymInt):
    """A whole number."""

    def __index__(self) -> int:
        return int(self.fixed())


class Real(Symbol, torch.SymFloat):
    """A real number."""


def symbol(value: Any, recorded: fx.Node, recorder: NumberRecorder) -> Any:
    """A number that an operation finds; booleans and the like are settled for the sample."""
    # `type`, not `isinstance`: a boolean is an `int` in Python, and code branches on it.
    if type(value) is int:
        return Integer(value, recorded, recorder)
    if type(value) is float:
        return Real(value, recorded, recorder)
    recorder.require(recorded, value)
    return value


def plain(value: Any) -> Any:
    """The sample's value of what may be a symbol."""
    return value.value if isinstance(value, Symbol) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, Symbol))

"""Whether two options of a loader are the same, so that a loader made with one serves the other.

A function that is written inside the loop over epochs is a new object each time round. Two such are
the same when they have the same code and reach for the same variables. Whatever is not known to be
the same is another: that costs a new loader, and confuses nobody.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping, Sequence
from typing import Any

_PLAIN = (bool, int, float, complex, str, bytes, types.NoneType)


def same(one: Any, other: Any) -> bool:
    """Plain values by type and value; functions by what they do; other objects by identity."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, _PLAIN):
        return bool(one == other)
    if type(one) is tuple:
        return _same_items(one, other)
    if isinstance(one, types.FunctionType):
        return _same_function(one, other)
    if isinstance(one, types.MethodType):
        return one.__self__ is other.__self__ and same(one.__func__, other.__func__)
    if type(one) is functools.partial:
        return (
            same(one.func, other.func)
            and _same_items(one.args, other.args)
            and same_mapping(one.keywords, other.keywords)
        )
    return False


def same_mapping(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)


def _same_items(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(same, one, other))


def _same_function(one: types.FunctionType, other: types.FunctionType) -> bool:
    """Variables of an enclosing function are the same ones, not only of the same value now."""
    cells, others = one.__closure__ or (), other.__closure__ or ()
    return (
        one.__code__ == other.__code__
        and one.__globals__ is other.__globals__
        and len(cells) == len(others)
        and all(cell is known for cell, known in zip(cells, others, strict=True))
        and same(one.__defaults__, other.__defaults__)
        and same_mapping(one.__kwdefaults__ or {}, other.__kwdefaults__ or {})
        and not one.__dict__
        and not other.__dict__
    )

"""How a kind of value is taken apart, and put together again: a pair of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class CannotSerialize(Exception):  # noqa: N818  (advice on its way to a NotSerializableError)
    """Why a value of a known kind cannot be sent, and what to send instead."""


class Kind(NamedTuple):
    """`apart` gives two simpler values: a detail (a tensor's layout, a deque's length), and the
    content. It raises `CannotSerialize`. `together` takes both, and raises anything when they do
    not fit."""

    apart: Callable[[Any], tuple[Any, Any]]
    together: Callable[[Any, Any], Any]


def content_only(apart: Callable[[Any], Any], together: Callable[[Any], Any]) -> Kind:
    """A kind without a detail."""
    return Kind(lambda value: (None, apart(value)), lambda _, content: together(content))

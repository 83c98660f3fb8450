"""The interface for recording spans of time. It costs nothing where no trace is wanted.

A `Recorder` keeps the spans. Groups record one for every collective; whatever holds a group can
record others.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol

OVERLAPPING = frozenset({"gradients", "wait"})
"""Categories whose spans belong to no thread: they overlap, and may end on another thread than
they began on. All others must nest within their thread, as `with` makes them do."""


class Trace(Protocol):
    """Takes spans."""

    def span(
        self, name: str, category: str, **details: str | int | float
    ) -> AbstractContextManager[None]:
        """Lasts from entering to leaving what is returned, also when it is left by an error."""


class _Nothing:
    """`contextlib.nullcontext`, without what makes that slower."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None


class _NoTrace:
    __slots__ = ()

    def span(
        self, name: str, category: str, **details: str | int | float
    ) -> AbstractContextManager[None]:
        return _NOTHING


_NOTHING = _Nothing()
NO_TRACE: Trace = _NoTrace()

"""Some of the ranks, to which a collective can be confined."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from farandole.errors import UserError
from farandole.horovod.common.exceptions import NotInitialisedError


class Membership(Protocol):
    """What a process set must know of the session that it belongs to."""

    @property
    def rank(self) -> int: ...

    def ranks_of(self, process_set: ProcessSet, /) -> Sequence[int]: ...


_sources: list[Callable[[], Membership]] = []


def take_sessions_from(source: Callable[[], Membership]) -> None:
    """`source` gives the current session, and raises `NotInitialisedError` if there is none.

    The session knows this file, and not the other way round: it calls this when it is imported.
    """
    _sources[:] = [source]


def _session() -> Membership:
    if not _sources:
        raise NotInitialisedError
    return _sources[0]()


class ProcessSet:
    """Ranks 0, 2 and 5, say. It can be used from `hvd.init(process_sets=…)`, or from
    `hvd.add_process_set` on, until it is removed."""

    def __init__(self, ranks: Iterable[int] | int) -> None:
        """`range`, list or tuple of ranks; the order does not matter."""
        named = [ranks] if isinstance(ranks, int) else ranks
        found = list(named) if isinstance(named, Iterable) else []
        if not found or not all(isinstance(rank, int) for rank in found):
            raise UserError(f"a process set of {ranks}: name at least one rank by its number.")
        self.ranks: list[int] | None = sorted(set(found))
        self.process_set_id: int | None = None

    def size(self) -> int | None:
        """The number of its ranks; None if it has not been added."""
        if self.process_set_id is None:
            return None
        return len(_session().ranks_of(self))

    def rank(self) -> int | None:
        """This process's place in it; None if it has not been added. Raises where it has none."""
        if self.process_set_id is None:
            return None
        here = _session()
        ranks = here.ranks_of(self)
        if here.rank not in ranks:
            raise UserError(f"rank {here.rank} is not in {self}; ask included() before.")
        return ranks.index(here.rank)

    def included(self) -> bool | None:
        """Whether this process is in it; None if it has not been added."""
        if self.process_set_id is None:
            return None
        here = _session()
        return here.rank in here.ranks_of(self)

    def invalidate(self) -> None:
        """It has been removed, or Horovod has shut down."""
        self.process_set_id = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessSet) and (
            self.process_set_id == other.process_set_id and self.ranks == other.ranks
        )

    def __hash__(self) -> int:
        return hash((self.process_set_id, tuple(self.ranks or ())))

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    __repr__ = __str__


class GlobalProcessSet(ProcessSet):
    """All ranks. Always there, and always number 0."""

    def __init__(self) -> None:
        self.ranks = None
        self.process_set_id = 0

    def invalidate(self) -> None:
        """It comes back with the next `hvd.init()`."""


global_process_set = GlobalProcessSet()
"""All ranks: what every collective uses if nothing else is said."""


def as_process_set(given: ProcessSet | Sequence[int]) -> ProcessSet:
    return given if isinstance(given, ProcessSet) else ProcessSet(given)

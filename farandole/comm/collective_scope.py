"""What surrounds every collective: the trace of it, and errors that say what failed and why."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType

from farandole.comm.transports.base import Transport
from farandole.comm.transports.messages import PeerLost, name_ranks
from farandole.errors import CommError
from farandole.trace.spans import NO_TRACE, Trace


class CollectiveScopes:
    """Makes the scopes of one group's collectives. It remembers a loss: after one the ranks no
    longer agree about what was sent, so every later collective must fail and none may wait.

    `more_time` is what a user sets to make the ranks wait longer.
    """

    def __init__(self, transport: Transport, trace: Trace, more_time: str) -> None:
        self._transport = transport
        self.trace = trace
        self._more_time = more_time
        self._broken: str | None = None

    @property
    def is_broken(self) -> bool:
        """Whether a rank was lost."""
        return self._broken is not None

    def enter(
        self, what: str, nbytes: int, algorithm: str = "", *, by: str = "", traced: bool = True
    ) -> CollectiveScope:
        """For a `with` around the transport's part of a collective. Raises `CommError` in a group
        that is broken."""
        if self._broken is not None:
            raise CommError(f"{what} on {self._where}: {self._broken}")
        if self.trace is NO_TRACE or not traced:
            return CollectiveScope(self, what, None)
        by = by or self._transport.name
        span = self.trace.span(what, "comm", bytes=nbytes, algorithm=algorithm, by=by)
        return CollectiveScope(self, what, span)

    def explain(self, what: str, error: BaseException) -> CommError | None:
        """The error to raise instead: it names the collective and the ranks."""
        where = f"{what} failed on {self._where}"
        if isinstance(error, PeerLost):
            lost = self._transport.blame(error)
            # Set before anything is raised: a script that catches the error and calls the next
            # collective gets this reason at once. It would otherwise wait for messages that others
            # never send.
            self._broken = f"the group was broken by an earlier failure: {lost}."
            rest = f"; if it is only slow, {self._more_time} allows more" if lost.is_late else ""
            return CommError(f"{where}: {lost}. See the output of {name_ranks(lost.ranks)}{rest}.")
        return CommError(f"{where}: {error}") if isinstance(error, CommError) else None

    @property
    def _where(self) -> str:
        return f"rank {self._transport.rank} of {self._transport.size}"


class CollectiveScope:
    """Tells the trace, and makes errors say what failed. A class, because it is entered often."""

    __slots__ = ("_scopes", "_span", "_what")

    def __init__(
        self, scopes: CollectiveScopes, what: str, span: AbstractContextManager[None] | None
    ) -> None:
        self._scopes = scopes
        self._what = what
        self._span = span

    def __enter__(self) -> None:
        if self._span is not None:
            self._span.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._span is not None:
            self._span.__exit__(kind, error, trace)
        if error is not None:
            better = self._scopes.explain(self._what, error)
            if better is not None:
                raise better from error

"""Who has asked for what, and what is therefore done next: the same on every rank.

In each round every rank says what it newly wants, and hears all others. So each can keep this table
for itself, and all come to the same decisions, in the same order, without asking anybody. The order
in which a rank asks does not matter: a tensor is ready when all ranks have asked for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from farandole.comm.transports.messages import name_ranks
from farandole.horovod.engine.requests import ALLGATHER, ALLREDUCE, ALLTOALL, Request

ADASUM = "adasum"


class Announcement(NamedTuple):
    """What one rank says in one round."""

    requests: tuple[Request, ...] = ()
    joins: bool = False  # it has no more data: from now on it takes part with nothing
    leaves: str = ""  # why it will not come any more; this round is the last
    tuned: tuple[int, ...] = ()  # of rank 0: what all shall use from the next round on

    @property
    def is_empty(self) -> bool:
        return self == NOTHING

    @property
    def is_plain(self) -> bool:
        """Whether it asks for something and says nothing else."""
        return self == (self.requests, False, "", ())


NOTHING = Announcement()


@dataclass(frozen=True)
class Item:
    """What all ranks have asked for under one name; None for ranks that have joined."""

    requests: tuple[Request | None, ...]

    @property
    def like(self) -> Request:
        return next(request for request in self.requests if request is not None)

    @property
    def name(self) -> str:
        return self.like.name


@dataclass(frozen=True)
class Response:
    """To be done now, in one go. With an error, nothing is done and all who asked are told."""

    items: tuple[Item, ...]
    error: str = ""


@dataclass(frozen=True)
class Decision:
    """What follows from a round."""

    responses: tuple[Response, ...] = ()
    last_joined: int | None = None  # all ranks have joined; this one was the last
    leaving: tuple[tuple[int, str], ...] = ()
    is_news: bool = False  # whether anybody said anything


@dataclass
class _Wanted:
    """A name for which ranks are still missing."""

    requests: dict[int, Request] = field(default_factory=dict)
    since: float = 0.0


class Table:
    """`fusion_bytes`: up to so much is reduced in one go. `names`: what the ranks of a process set
    are called among all; what is said of them uses these numbers."""

    def __init__(self, size: int, fusion_bytes: int, names: Sequence[int] | None = None) -> None:
        self.size = size
        self.fusion_bytes = fusion_bytes
        self.names = names or range(size)
        self.joined: list[int] = []  # in the order in which they did
        self._wanted: dict[str, _Wanted] = {}

    def hear(self, said: Sequence[Announcement], now: float = 0.0) -> Decision:
        """One round: `said[r]` is rank r's. `now` is only kept, for `overdue`."""
        if all(one.is_empty for one in said):
            return Decision()
        touched: dict[str, None] = {}  # a set that keeps the order
        # The invariant: what follows depends only on what was heard, in rank order, and never on
        # this rank or the time. Otherwise two ranks would carry out different collectives.
        for rank, one in enumerate(said):
            for request in one.requests:
                wanted = self._wanted.setdefault(request.name, _Wanted(since=now))
                wanted.requests[rank] = request
                touched[request.name] = None
        newly = [rank for rank, one in enumerate(said) if one.joins]
        if newly:
            self.joined += newly
            touched = dict.fromkeys(self._wanted)  # for all of them fewer are missing now
        leaving = tuple(
            (self.names[rank], one.leaves) for rank, one in enumerate(said) if one.leaves
        )
        ready = [name for name in touched if self._is_ready(name)]
        responses = self._responses([self._take(name) for name in ready])
        last = None
        if len(self.joined) == self.size:
            last = self.joined[-1]
            self.joined.clear()
        return Decision(responses, last, leaving, is_news=True)

    def overdue(self, before: float) -> list[tuple[str, list[int], list[int]]]:
        """What was first asked for before then: the name, who has asked, and who has not."""
        return [
            (name, self._called(sorted(wanted.requests)), self._called(self._missing(wanted)))
            for name, wanted in self._wanted.items()
            if wanted.since < before
        ]

    def _called(self, ranks: Sequence[int]) -> list[int]:
        return [self.names[rank] for rank in ranks]

    def _missing(self, wanted: _Wanted) -> list[int]:
        return [
            rank
            for rank in range(self.size)
            if rank not in wanted.requests and rank not in self.joined
        ]

    def _is_ready(self, name: str) -> bool:
        wanted = self._wanted[name]
        if len(wanted.requests) == self.size:
            return True
        return bool(self.joined) and not self._missing(wanted)

    def _take(self, name: str) -> tuple[Item, str]:
        wanted = self._wanted.pop(name)
        item = Item(tuple(wanted.requests.get(rank) for rank in range(self.size)))
        return item, problem_with(item, self.names)

    def _responses(self, taken: Sequence[tuple[Item, str]]) -> tuple[Response, ...]:
        """All-reduces of one kind together, as many as fit; each where its first one stands."""
        done: list[list[Item] | Response] = []
        open_batches: dict[tuple[object, ...], tuple[list[Item], int]] = {}
        for item, error in taken:
            like = item.like
            if error or like.kind != ALLREDUCE:
                done.append(Response((item,), error))
                continue
            # Only what is reduced in the same way can share a buffer. Batches are filled in the
            # order of `taken`, which is the same on all ranks.
            key = (like.op, like.dtypes[0], like.device, like.prescale, like.postscale)
            batch, filled = open_batches.get(key, (None, 0))
            nbytes = like.nbytes
            mixed = len(set(like.dtypes)) > 1
            if batch is None or mixed or filled + nbytes > self.fusion_bytes:
                batch, filled = [], 0
                done.append(batch)
            batch.append(item)
            if not mixed:
                open_batches[key] = (batch, filled + nbytes)
        return tuple(one if isinstance(one, Response) else Response(tuple(one)) for one in done)


def problem_with(item: Item, names: Sequence[int] | None = None) -> str:
    """Why this cannot be done: what two ranks want does not fit together. Empty if it can."""
    pairs = list(zip(names or range(len(item.requests)), item.requests, strict=True))
    asked = [(rank, request) for rank, request in pairs if request is not None]
    first_rank, first = asked[0]
    for rank, request in asked[1:]:
        if request == first or _alike(first, request):
            continue
        return (
            f"the ranks do not ask for the same under the name {first.name!r}: rank {first_rank} "
            f"for {first}, rank {rank} for {request}. Make the calls agree, or give them different "
            "names."
        )
    if len(asked) < len(item.requests):
        absent = [rank for rank, request in pairs if request is None]
        return _problem_with_joined(first, absent)
    return ""


def _alike(one: Request, other: Request) -> bool:
    """Whether they may differ as they do: only in the rows that each rank gives."""
    if one.kind != other.kind or one.kind not in (ALLGATHER, ALLTOALL):
        return False
    rows = tuple(shape[1:] for shape in one.shapes), tuple(shape[1:] for shape in other.shapes)
    ranks = tuple(map(len, one.shapes)), tuple(map(len, other.shapes))
    same = one._replace(shapes=(), splits=()) == other._replace(shapes=(), splits=())
    return same and rows[0] == rows[1] and ranks[0] == ranks[1]


def _problem_with_joined(first: Request, absent: Sequence[int]) -> str:
    """Who has joined can add nothing to a reduction. What all others do needs what it has."""
    if first.kind == ALLREDUCE and first.op != ADASUM:
        return ""
    what = "Adasum" if first.op == ADASUM else first.kind
    verb = "has" if len(absent) == 1 else "have"
    return (
        f"{first.name!r}: {what} needs every rank, and {name_ranks(absent)} {verb} joined. Until "
        "all have, only all-reduces can be done (of sparse gradients with sparse_as_dense=True)."
    )

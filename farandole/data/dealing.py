"""Who reads which samples of what is left of an epoch, when ranks come and go in the middle of it.

Workers may be lost between two steps that all of them take together. What a lost worker had read
and not contributed to a step goes back, and is dealt again, first of all, with the rest:

    order of the epoch        0 1 2 3 4 5 6 7 8 9 10 11 12 …
    batch 0, 4 workers        a a b b c c d d                   all contributed: used
    batch 1, 4 workers                        a a b  b  c …     c is lost; a, b and d contribute
    dealt again, 3 workers    what c had read of batch 1, then the rest of the order

Batches are numbered on and on over all dealings of a loader. All survivors know the same of this:
how many batches were contributed, and how many were handed out to any of them. Nobody needs to know
what a lost worker did. No torch and no processes here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from farandole.data.shares import Part, Shares


class Described(NamedTuple):
    """One rank's part of a batch, as its members contribute to a step."""

    samples: int  # of all of them together
    weight: float  # by which the rank's mean gradient counts in the average over them
    readers: int  # of each of the rank's samples
    own: float  # the rank's samples; one that n of them read counts 1/n on each


@dataclass(frozen=True)
class BatchInfo:
    """Describes the batch that a loader is about to hand out."""

    step: int  # in this epoch, from 0
    steps: int | None  # in the epoch; None when the dataset has no length
    samples: int  # of all ranks together
    weight: float  # see `Shares.share_weight`
    readers: int  # ranks that read each sample of this rank's batch, this one among them
    own_samples: float  # of this rank: one that n ranks read counts 1/n on each
    skipped: int = 0  # samples of this rank's batch that could not be decoded, and are left out


@dataclass(frozen=True)
class Dealing:
    """One cut of what is left: places in the epoch's order, over `members`, in the order of their
    ranks. `returned` come first, then all places from `start` on."""

    shares: Shares
    members: tuple[int, ...]
    returned: tuple[int, ...] = ()
    start: int = 0
    first: int = 0  # the number of its first batch

    def place(self, at: int) -> int:
        """The place in the epoch's order of what is number `at` in this dealing."""
        early = len(self.returned)
        return self.returned[at] if at < early else self.start + at - early

    def batch(self, number: int) -> list[int]:
        """The places of batch `number`, of all members."""
        return self._places(self.shares.global_range(number - self.first))

    def share(self, number: int, rank: int) -> list[int]:
        return self._places(self.shares.share(number - self.first, rank))

    def _places(self, ats: range) -> list[int]:
        if self.returned:
            return [self.place(at) for at in ats]
        return list(range(self.start + ats.start, self.start + ats.stop))  # nearly always

    def left(self, number: int) -> tuple[list[int], int]:
        """What is returned, and where to go on, when all batches before `number` are handed out."""
        used = 0
        if number > self.first:
            used = self.shares.global_range(number - 1 - self.first).stop
        early = len(self.returned)
        return list(self.returned[used:]), self.start + max(0, used - early)

    def part(self, number: int, rank: int) -> Part:
        return self.shares.part(number - self.first, rank)

    def describe(self, number: int, rank: int, alive: Collection[int]) -> Described:
        """What `rank` needs to know of batch `number`, which only the `alive` contribute to."""
        part, samples = self.part(number, rank), self.length(number)
        readers, ranks = part.readers, len(self.members)
        if not all(member in alive for member in self.members):
            parts = [self.part(number, other).where for other in self._alive(alive)]
            readers, ranks = parts.count(part.where), len(parts)
            samples -= len(self.unread(number, alive))
        own = (part.stop - part.start) / readers
        return Described(samples, own * ranks / samples, readers, own)

    def length(self, number: int) -> int:
        """How many samples the batch has for all members."""
        return len(self.shares.global_range(number - self.first))

    def _alive(self, alive: Collection[int]) -> list[int]:
        return [rank for rank, member in enumerate(self.members) if member in alive]

    def unread(self, number: int, alive: Collection[int]) -> list[int]:
        """The places of the batch that none of the `alive` reads."""
        if all(member in alive for member in self.members):
            return []
        read = {place for rank in self._alive(alive) for place in self.share(number, rank)}
        return [place for place in self.batch(number) if place not in read]


@dataclass
class Dealings:
    """The dealings of one epoch of one loader, as far as batches of theirs may still be lost.

    `handed_out` and `contributed` count batches: the first of this rank, the second of all.
    """

    handed_out: int = 0
    contributed: int = 0
    is_over: bool = False  # the rest is to be dealt anew before the next batch
    _known: list[Dealing] = field(default_factory=list)
    _sharers: frozenset[int] = frozenset()  # of the rest, as far as it is known
    _rest: tuple[list[int], int] = field(default_factory=lambda: ([], 0))  # when it is over

    @property
    def has_begun(self) -> bool:
        return bool(self._known)

    @property
    def current(self) -> Dealing:
        """That the next batch belongs to, or the last one belonged to."""
        return self._known[-1]

    def begin(self, dealing: Dealing) -> None:
        """The next batch is the first of `dealing`."""
        self._known.append(replace(dealing, first=self.handed_out))
        self._sharers = frozenset(dealing.members)
        self.is_over = False
        self._forget()

    def hand_out(self) -> int:
        """One more batch; returns its number."""
        self.handed_out += 1
        return self.handed_out - 1

    def contribute(self) -> None:
        """All that was handed out so far is part of steps that all ranks have taken."""
        self.contributed = self.handed_out
        self._forget()

    def end_epoch(self) -> None:
        """What is handed out belongs to it for good."""
        self.contributed = self.handed_out
        self._known.clear()
        self.is_over = False

    def end_here(self, alive: Collection[int]) -> tuple[list[int], int]:
        """The rest is to be dealt anew, when all ranks have the same batches. Only the `alive`
        contribute to those that are under way.

        Returns the places that go back, and where the order goes on after them.
        """
        gone: list[int] = []
        for number, dealing in self._under_way():
            # What those who were lost earlier had read has gone back already.
            before = set(dealing.unread(number, self._sharers))
            gone += [place for place in dealing.unread(number, alive) if place not in before]
        # Workers may come and go once more before the next batch: then the rest is not what the
        # current dealing leaves, but what it was the last time.
        returned, start = self._rest if self.is_over else self.current.left(self.handed_out)
        self.is_over = True
        self._sharers = frozenset(alive)
        self._rest = [*gone, *returned], start
        return self._rest

    def lost_samples(self, before: Collection[int], after: Collection[int]) -> int:
        """How many samples of the batches under way nobody reads, when those `before` lose some."""
        return sum(
            len(dealing.unread(number, after)) - len(dealing.unread(number, before))
            for number, dealing in self._under_way()
        )

    def rescaling(self, own: int, before: Collection[int], after: Collection[int]) -> set[float]:
        """By what worker `own` must multiply its gradients of the batches under way, when those
        `before` lose some: one number for each batch, mostly the same."""
        found = set()
        for number, dealing in self._under_way():
            if own in dealing.members:
                rank = dealing.members.index(own)
                weight = dealing.describe(number, rank, before).weight
                found.add(dealing.describe(number, rank, after).weight / weight)
        return found

    def _under_way(self) -> list[tuple[int, Dealing]]:
        """The batches that are not contributed yet, each with its dealing."""
        if not self._known:
            return []
        return [(number, self._of(number)) for number in range(self.contributed, self.handed_out)]

    def _of(self, number: int) -> Dealing:
        return next(dealing for dealing in reversed(self._known) if dealing.first <= number)

    def _forget(self) -> None:
        while len(self._known) > 1 and self._known[1].first <= self.contributed:
            del self._known[0]


def rest_of(shares: Shares, returned: Sequence[int], start: int) -> Shares | None:
    """The cut of what is left; None when that makes no step."""
    return shares.after(start - len(returned))

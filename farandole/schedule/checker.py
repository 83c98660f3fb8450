"""Proves a schedule by playing it with symbols instead of numbers.

The state is, for each rank and chunk, how often each rank's contribution is in it: at the start
once your own, at the end (of an all-reduce) once everyone's. No arithmetic on values can prove as
much, because wrong sums may cancel.

Beyond the result, each round must be free of races: no chunk of a rank is both sent and received,
or copied to while something else arrives in it. Then a runtime may carry out a round's transfers in
place and in any order, and no round depends on a later one. And each result must be computed in one
place and copied from there, so that all ranks end with the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from farandole.schedule.error import ScheduleError
from farandole.schedule.rounds import Round, Schedule

Indices = npt.NDArray[np.int64]


def check(schedule: Schedule) -> None:
    """Returns if `schedule` is right, for vectors of any length; raises `ScheduleError` if not.

    Takes p² bytes of memory for each chunk.
    """
    state = _State.start(schedule)
    for index, turn in enumerate(schedule.rounds):
        _check_form(schedule, index, turn)
        state.play(index, turn)
    state.check_end()


def _check_form(schedule: Schedule, index: int, turn: Round) -> None:
    """Ranks and chunks exist, and nobody sends to itself."""
    rules = {
        f"names a rank outside 0 … {schedule.ranks - 1}": (
            (np.minimum(turn.src, turn.dst) < 0)
            | (np.maximum(turn.src, turn.dst) >= schedule.ranks)
        ),
        "sends from a rank to itself": turn.src == turn.dst,
        f"carries no run of the chunks 0 … {schedule.chunks - 1}": (
            (turn.first < 0) | (turn.first >= turn.stop) | (turn.stop > schedule.chunks)
        ),
    }
    for problem, breaks in rules.items():
        if breaks.any():
            offender = turn[int(np.argmax(breaks))]
            raise ScheduleError(f"{schedule.name}, round {index}: {offender} {problem}.")


@dataclass
class _State:
    """What every rank holds. A place is a chunk of a rank: number `rank * chunks + chunk`."""

    schedule: Schedule
    counts: npt.NDArray[np.uint8]  # place, contributor
    origin: Indices  # by place: equal numbers are equal bits
    origins: int  # given out so far

    @classmethod
    def start(cls, schedule: Schedule) -> _State:
        """Every rank holds its own contribution, once, in every chunk."""
        places = schedule.ranks * schedule.chunks
        own = np.repeat(np.eye(schedule.ranks, dtype=np.uint8), schedule.chunks, axis=0)
        return cls(schedule, own, np.arange(places), places)

    def play(self, index: int, turn: Round) -> None:
        """Carries out a round; all of it reads the state before."""
        # A row for each chunk that travels.
        run = turn.stop - turn.first
        transfer = np.repeat(np.arange(len(turn)), run)
        nth_of_run = np.arange(len(transfer)) - np.repeat(np.cumsum(run) - run, run)
        chunk = turn.first[transfer] + nth_of_run
        source = turn.src[transfer].astype(np.int64) * self.schedule.chunks + chunk
        target = turn.dst[transfer].astype(np.int64) * self.schedule.chunks + chunk
        adds = turn.adds[transfer]
        self._check_races(index, source, target, adds)

        added, copied = self.counts[source[adds]], self.counts[source[~adds]]
        copied_origin = self.origin[source[~adds]]
        self._add(index, source[adds], target[adds], added)
        # Read before anything is written (`copied`, `added`), so the order of transfers does not
        # matter.
        self.counts[target[~adds]] = copied
        self.origin[target[~adds]] = copied_origin

    def _check_races(
        self, index: int, source: Indices, target: Indices, adds: npt.NDArray[np.bool_]
    ) -> None:
        writes = np.bincount(target, minlength=len(self.origin))
        sent_and_received = writes[source] > 0
        if sent_and_received.any():
            rank, chunk = self._place(source[sent_and_received][0])
            self._fail(index, f"rank {rank} sends chunk {chunk} while it also receives it")
        overwritten = ~adds & (writes[target] > 1)
        if overwritten.any():
            place = target[overwritten][0]
            rank, chunk = self._place(place)
            senders = self._ranks(source[target == place])
            self._fail(
                index,
                f"rank {rank} gets a copy of chunk {chunk} while something else arrives there; "
                f"senders: {senders}",
            )

    def _add(
        self, index: int, source: Indices, target: Indices, added: npt.NDArray[np.uint8]
    ) -> None:
        """Adds rows to places; several may go to the same one."""
        if not len(target):
            return
        order = np.argsort(target, kind="stable")
        places, begins = np.unique(target[order], return_index=True)
        # In 32 bits, because many contributions may arrive at once and a byte would wrap round to a
        # value that looks right.
        sums = np.add.reduceat(added[order], begins, axis=0, dtype=np.int32) + self.counts[places]
        # Nothing can take a contribution out again, so the error is named where it is made.
        if sums.max() > 1:
            row, contributor = np.argwhere(sums > 1)[0]
            rank, chunk = self._place(places[row])
            self._fail(
                index,
                f"rank {rank} has rank {contributor}'s contribution to chunk {chunk} "
                f"{sums[row, contributor]} times after adding what came from "
                f"rank(s) {self._ranks(source[target == places[row]])}",
            )
        self.counts[places] = sums
        self.origin[places] = self.origins + np.arange(len(places))
        self.origins += len(places)

    def check_end(self) -> None:
        """Compares with what the collective promises, where it promises something."""
        ranks, chunks = self.schedule.ranks, self.schedule.chunks
        counts = self.counts.reshape(ranks, chunks, ranks)
        owner = np.empty(chunks, dtype=np.int64)
        for rank in range(ranks):
            owned = self.schedule.owned(rank)
            owner[owned.start : owned.stop] = rank
        wanted = np.ones((ranks, chunks, ranks), dtype=np.uint8)
        # A reduce-scatter promises a chunk on its owner alone; the others may be left with partial
        # sums.
        matters = np.ones((ranks, chunks), dtype=np.bool_)
        if self.schedule.collective == "all_gather":
            wanted[:] = owner[:, None] == np.arange(ranks)
        if self.schedule.collective == "reduce_scatter":
            matters[:] = owner == np.arange(ranks)[:, None]

        wrong = (counts != wanted) & matters[:, :, None]
        if wrong.any():
            rank, chunk, contributor = np.argwhere(wrong)[0]
            word = "lacks" if wanted[rank, chunk, contributor] else "should not have"
            raise ScheduleError(
                f"{self.schedule.name}, after all {len(self.schedule.rounds)} rounds: rank {rank} "
                f"{word} rank {contributor}'s contribution to chunk {chunk}."
            )
        origin = self.origin.reshape(ranks, chunks)
        differs = (origin != origin[0]) & matters & matters[0]
        if differs.any():
            rank, chunk = np.argwhere(differs)[0]
            raise ScheduleError(
                f"{self.schedule.name}, after all {len(self.schedule.rounds)} rounds: ranks 0 and "
                f"{rank} summed chunk {chunk} each for itself and may differ in the last bits; "
                "sum it on one rank and copy it to the others."
            )

    def _place(self, number: np.int64) -> tuple[int, int]:
        rank, chunk = divmod(int(number), self.schedule.chunks)
        return rank, chunk

    def _ranks(self, places: Indices) -> list[int]:
        return [self._place(place)[0] for place in places]

    def _fail(self, index: int, problem: str) -> None:
        raise ScheduleError(f"{self.schedule.name}, round {index}: {problem}.")

"""The data: transfers, rounds and schedules. Every other file in this folder reads or builds them.

A collective over p ranks works on a vector that is cut into chunks. It runs in rounds; a round is a
set of transfers. Each carries a run of chunks from one rank to another, where they are added to
what is there or replace it. All transfers of a round read what the rounds before it have left.

A ring of 2,048 ranks has 8.4 million transfers, so a round keeps them as columns. Columns are never
written to, and rounds may share them: all rounds of that ring are views of the same two arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from farandole.errors import UserError
from farandole.schedule.pieces import piece

Op = Literal["add", "copy"]
Collective = Literal["all_reduce", "reduce_scatter", "all_gather"]
Integers = npt.NDArray[np.int32]


class Transfer(NamedTuple):
    """Chunks `first` … `stop - 1` travel from rank `src` to rank `dst`."""

    src: int
    dst: int
    first: int
    stop: int
    op: Op

    def __str__(self) -> str:
        chunks = str(self.first) if self.stop == self.first + 1 else f"{self.first}-{self.stop - 1}"
        return f"{self.src}→{self.dst} {'+' if self.op == 'add' else '='}{chunks}"


class Move(NamedTuple):
    """A transfer as one of its two ends sees it."""

    peer: int
    first: int
    stop: int
    op: Op


class RankRound(NamedTuple):
    """What one rank does in one round; both are empty when it only waits."""

    sends: tuple[Move, ...]
    receives: tuple[Move, ...]


@dataclass(frozen=True, eq=False)
class Round:
    """Transfers that happen at the same time, one column per property.

    Several additions to the same chunk of the same rank are applied in the order they stand here,
    so that floating-point sums come out the same every time.
    """

    src: Integers
    dst: Integers
    first: Integers
    stop: Integers
    adds: npt.NDArray[np.bool_]

    def __post_init__(self) -> None:
        lengths = [len(column) for column in self._columns]
        if len(set(lengths)) != 1:
            raise UserError(f"a round's columns have lengths {lengths}; they must be equal.")
        for column in self._columns:
            column.flags.writeable = False

    @classmethod
    def of(
        cls,
        src: npt.ArrayLike,
        dst: npt.ArrayLike,
        first: npt.ArrayLike,
        stop: npt.ArrayLike,
        op: Op,
    ) -> Round:
        """From arrays or single numbers, which then hold for all transfers."""
        columns = [np.asarray(column, dtype=np.int32) for column in (src, dst, first, stop)]
        broadcast = np.broadcast_arrays(*columns, np.asarray(op == "add"))
        return cls(*(np.atleast_1d(column) for column in broadcast))

    @classmethod
    def merged(cls, rounds: Sequence[Round]) -> Round:
        """All transfers of `rounds` in one, in the order given."""
        if len(rounds) == 1:
            return rounds[0]
        columns = zip(*(part._columns for part in rounds), strict=True)
        src, dst, first, stop, adds = (np.concatenate(column) for column in columns)
        return cls(src, dst, first, stop, adds)

    @classmethod
    def from_transfers(cls, transfers: Sequence[Transfer]) -> Round:
        """From single transfers: short to write, slow to build for many ranks."""
        numbers = np.array([transfer[:4] for transfer in transfers], dtype=np.int32).reshape(-1, 4)
        src, dst, first, stop = numbers.T
        adds = np.array([transfer.op == "add" for transfer in transfers], dtype=np.bool_)
        return cls(src, dst, first, stop, adds)

    @property
    def _columns(self) -> tuple[npt.NDArray[Any], ...]:
        return self.src, self.dst, self.first, self.stop, self.adds

    def __len__(self) -> int:
        return len(self.src)

    def __getitem__(self, index: int) -> Transfer:
        src, dst, first, stop, adds = (column[index].item() for column in self._columns)
        return Transfer(src, dst, first, stop, "add" if adds else "copy")

    def __iter__(self) -> Iterator[Transfer]:
        return (self[index] for index in range(len(self)))

    def sends(self, rank: int) -> tuple[Move, ...]:
        return self._moves(self.src == rank, self.dst)

    def receives(self, rank: int) -> tuple[Move, ...]:
        return self._moves(self.dst == rank, self.src)

    def _moves(self, mine: npt.NDArray[np.bool_], peers: Integers) -> tuple[Move, ...]:
        chosen = np.flatnonzero(mine)
        columns = (peers, self.first, self.stop, self.adds)
        rows = zip(*(column[chosen].tolist() for column in columns), strict=True)
        return tuple(
            Move(peer, first, stop, "add" if adds else "copy") for peer, first, stop, adds in rows
        )


@dataclass(frozen=True, eq=False)
class Schedule:
    """An algorithm for `ranks` ranks over `chunks` chunks: who sends what to whom, in which round.

    In a reduce-scatter or an all-gather rank r owns the chunks `owned(r)`.
    """

    name: str
    ranks: int
    chunks: int
    rounds: tuple[Round, ...] = field(repr=False)
    collective: Collective = "all_reduce"

    def __post_init__(self) -> None:
        require_ranks(self.name, self.ranks)
        if self.chunks < 1:
            raise UserError(f"{self.name}: {self.chunks} chunks; give at least 1.")

    def for_rank(self, rank: int) -> list[RankRound]:
        """What `rank` sends and receives, round by round."""
        if not 0 <= rank < self.ranks:
            raise UserError(f"{self.name}: there is no rank {rank} among {self.ranks} ranks.")
        return [RankRound(turn.sends(rank), turn.receives(rank)) for turn in self.rounds]

    def owned(self, rank: int) -> range:
        """The chunks whose result a reduce-scatter leaves on `rank`."""
        return piece(rank, self.ranks, self.chunks)

    def draw(self) -> str:
        """One line a round, for people: `0→1 +2` adds chunk 2 of rank 0 to rank 1's, `=` copies."""
        head = f"{self.name}: {self.ranks} ranks, {self.chunks} chunks, {len(self.rounds)} rounds"
        lines = [
            f"  {index}: " + ", ".join(str(transfer) for transfer in turn)
            for index, turn in enumerate(self.rounds)
        ]
        return "\n".join([head, *lines])


def require_ranks(name: str, ranks: int) -> None:
    """The first line of every algorithm: it works for any number of ranks from 1 on."""
    if ranks < 1:
        raise UserError(f"{name}: {ranks} ranks; give at least 1.")

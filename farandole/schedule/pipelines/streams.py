"""Schemes without a flush: a step begins before the one before it has ended.

    step call    0        1        2        3        drain after 4 calls
    rank 0       F0       F1       F2 B0 U  F3 B1 U  B2 U B3 U
    rank 1       F0       F1 B0 U  F2 B1 U  F3 B2 U  B3 U
    rank 2       F0 B0 U  F1 B1 U  F2 B2 U  F3 B3 U

A call does a rank's turn. Nobody knows at that time how many calls will follow, so a turn depends
on its number alone; what is still under way at the end is the drain. A pipeline, which can be
checked and simulated, is a number of turns with their drain.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from farandole.errors import UserError
from farandole.schedule.pipelines.actions import Action, Pipeline
from farandole.schedule.pipelines.placement import Homes


@dataclass(frozen=True)
class Stream(ABC):
    """What every rank does in each step call of an endless run."""

    name: str
    stages: int
    homes: tuple[Homes, ...]  # as in `Pipeline`: by direction and stage
    micros: int  # micro-batches of one step call; their numbers run on from call to call

    @property
    def ranks(self) -> int:
        return sum(len(ranks) for ranks in self.homes[0])

    @abstractmethod
    def turn(self, rank: int, k: int) -> tuple[Action, ...]:
        """What `rank` does in the step call number `k`, from 0 on; perhaps nothing."""

    @abstractmethod
    def drain(self, rank: int, n: int) -> tuple[Action, ...]:
        """What remains for `rank` after `n` step calls."""

    def unroll(self, n: int) -> Pipeline:
        """`n` step calls and the drain, as a pipeline."""
        if n < 1:
            raise UserError(f"{self.name}: {n} steps; give at least 1.")
        actions = tuple(
            (*(action for k in range(n) for action in self.turn(rank, k)), *self.drain(rank, n))
            for rank in range(self.ranks)
        )
        return Pipeline(self.name, n * self.micros, self.homes, actions)

    def place(self, rank: int) -> tuple[int, int, int]:
        """The stage of a rank, its number among the ranks of that stage, and their count."""
        for stage, ranks in enumerate(self.homes[0]):
            if rank in ranks:
                return stage, ranks.index(rank), len(ranks)
        raise UserError(f"{self.name}: rank {rank} is not among 0 … {self.ranks - 1}.")

"""A worker of an elastic job, as its policy sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from farandole.worker.failure import Failure


@dataclass
class ElasticWorker:
    """One that runs. Its `number` stays; its rank changes with the generation."""

    number: int
    host: str
    wave: int  # those of one wave were started together
    since: float  # when it was started
    rank: int | None = None  # in the current generation
    is_new: bool = False  # it may have had a rank, but has not got the state from the others
    is_promised: bool = False  # it was told a rank that it will have when it is ready
    is_dismissed: bool = False  # it was told to leave
    is_named: bool = False  # as one that the others wait for
    held_up: str | None = None  # how it did so to the others, and was ended

    def describe(self, failure: Failure) -> str:
        """Who it was, and how it ended."""
        rank = "before it had a rank" if self.rank is None else f"rank {self.rank}"
        return f"worker {self.number} on {self.host} ({rank}) {failure.how}"


def listed(hosts: Mapping[str, int]) -> str:
    return ", ".join(f"{host}:{slots}" for host, slots in hosts.items()) or "none"

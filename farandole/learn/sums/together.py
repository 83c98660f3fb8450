"""Several sums in one pass over the data."""

from __future__ import annotations

from typing import Any

from farandole.learn.sources.chunk import Chunk
from farandole.learn.sums.sum import Statistics, Sum


class Together(Sum):
    """The state and the result are dicts, by the names of the sums."""

    def __init__(self, **jobs: Sum) -> None:
        self.jobs = jobs
        self.in_blocks = all(job.in_blocks for job in jobs.values())

    def map(self, chunk: Chunk, state: Any) -> Statistics:
        return {
            f"{name}/{key}": value
            for name, job in self.jobs.items()
            for key, value in job.map(chunk, (state or {}).get(name)).items()
        }

    def merge(self, left: Statistics, right: Statistics) -> Statistics:
        return {
            f"{name}/{key}": value
            for name, job in self.jobs.items()
            for key, value in job.merge(_of(name, left), _of(name, right)).items()
        }

    def finish(self, statistics: Statistics, state: Any) -> Any:
        return {
            name: job.finish(_of(name, statistics), (state or {}).get(name))
            for name, job in self.jobs.items()
        }


def _of(name: str, statistics: Statistics) -> Statistics:
    begin = f"{name}/"
    return {
        key.removeprefix(begin): value for key, value in statistics.items() if key.startswith(begin)
    }

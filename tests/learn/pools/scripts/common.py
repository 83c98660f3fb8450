"""What the scripts of all clusters do: sums, compared with those of one thread."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np

from farandole.learn.pools.base import Placed
from farandole.learn.pools.choose import as_pool
from farandole.learn.pools.here import Here
from farandole.learn.sources.source import Source
from tests.support.sums import Raising, Total

random = np.random.default_rng(0)
X = random.normal(size=(1003, 7)) * 10.0 ** random.integers(-3, 4, size=7)
SOURCE = Source(X, chunk_rows=20)
with Here(1).place(SOURCE) as placed:
    EXPECTED = placed.sum(Total(), 1.5)


class KilledOnce(Total):
    """The first process that comes to chunk 20 is killed there."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def map(self, chunk: Any, state: Any) -> Any:
        if chunk.number == 20:
            try:
                self.mark.touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().map(chunk, state)


def try_all(pool: Any, *, kill: bool) -> None:
    """Prints what it finds."""
    with as_pool(pool).place(SOURCE) as placed:
        # In several passes: the chunks stay there.
        print("the same bits:", all(is_expected(placed, Total()) for _ in range(3)))
        if kill:
            survived = is_expected(placed, KilledOnce(Path("killed").resolve()))
            again = is_expected(placed, Total())
            print(f"with a worker killed: {survived and again}, {placed.counts.losses} lost")
        try:
            placed.sum(Raising(), 1.5)
        except ZeroDivisionError as error:
            print(f"ZeroDivisionError: {error}")


def is_expected(placed: Placed, job: Total) -> bool:
    return np.array_equal(placed.sum(job, 1.5), EXPECTED)

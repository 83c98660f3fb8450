"""A worker: ADDRESS KEY_FILE RANK. Worker 1 kills itself in its second pass."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import numpy as np

from farandole.learn.pools.here import Here
from farandole.learn.pools.parameter_servers import ParameterServers
from farandole.learn.sources.chunk import Chunk
from farandole.learn.sources.source import Source
from farandole.learn.sums.sum import Statistics
from farandole.server import Store
from tests.support.sums import Total

X = np.random.default_rng(0).normal(size=(203, 3))


class Deadly(Total):
    """Kills worker 1 in the pass that begins with 2.5."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def map(self, chunk: Chunk, state: Any) -> Statistics:
        if self.rank == 1 and state == 2.5:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().map(chunk, state)


def main() -> None:
    address, key_file, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
    source = Source(X, chunk_rows=20)
    with Here(1).place(source) as alone:
        expected = [alone.sum(Total(), state) for state in (1.5, 2.5, 1.5)]
    with (
        Store(address, key_file, rank=rank, workers=3) as store,
        ParameterServers(store).place(source) as placed,
    ):
        first = placed.sum(Total(), 1.5)
        second = placed.sum(Deadly(rank), 2.5)
        third = placed.sum(Deadly(rank), 1.5)
        found = [first, second, third]
        np.savez(f"{rank}.npz", found=found, expected=expected, losses=placed.counts.losses)


if __name__ == "__main__":
    main()

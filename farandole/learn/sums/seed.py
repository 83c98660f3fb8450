"""One seed for all workers.

Without `random_state` every rank draws a seed of its own, and models that start differently on
each rank would come to differ. So the seed is agreed on in the first pass over the data.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from farandole.learn.sources.chunk import Chunk
from farandole.learn.sums.sum import Statistics, Sum, as_statistics


class SeedSum(Sum):
    """The seed of whoever reads the first chunk. A `random_state` that is a number is the seed."""

    in_blocks = True

    def __init__(self, random_state: Any) -> None:
        if isinstance(random_state, int | np.integer):
            self.seed = int(random_state)
        else:
            # Not at the top: workers have the seed, and need not wait for scikit-learn.
            from sklearn.utils import check_random_state

            self.seed = int(check_random_state(random_state).randint(2**31))

    def map(self, chunk: Chunk, state: Any) -> Statistics:
        return as_statistics(seed=self.seed)

    def merge(self, left: Statistics, right: Statistics) -> Statistics:
        return left

    def finish(self, statistics: Statistics, state: Any) -> int:
        return int(statistics["seed"])

"""The vectors on parameter servers: one table, each vector in a slot of its own.

All slots of a row are on the same server. So sums and products are worked out where the numbers
are, and only coefficients and results travel.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from farandole.learn.lbfgs.history import Pair
from farandole.learn.lbfgs.vectors import Combinations, Vector, Vectors
from farandole.server import Store


class ServedVectors(Vectors):
    """In the table `name`, which is made if there is none."""

    def __init__(self, store: Store, name: str, places: int, length: int) -> None:
        self._store = store
        self._name = name
        store.create(name, length, dtype="float64", rule=f"vectors:count={places}")

    def put(self, place: int, values: Vector) -> None:
        tensor = torch.from_numpy(np.array(values, dtype=np.float64))
        self._store.start_put(self._name, tensor, slot=place).wait()

    def get(self, place: int) -> Vector:
        found: torch.Tensor = self._store.start_get(self._name, slot=place).wait()
        vector: Vector = found.view(-1).numpy()
        return vector

    def combine(self, combinations: Combinations) -> None:
        self._store.combine(self._name, combinations)

    def dots(self, pairs: Sequence[Pair]) -> list[float]:
        return self._store.dots(self._name, pairs)

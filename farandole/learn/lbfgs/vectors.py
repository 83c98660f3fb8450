"""Where the vectors are, and what can be done to them: sums of multiples, and products.

Every algorithm step is a few numbers that travel there and a few that come back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from farandole.learn.lbfgs.history import Pair
from farandole.learn.pools.base import one_blas_thread

Vector = npt.NDArray[np.float64]
Combinations = Mapping[int, Mapping[int, float]]
"""For some places the sum of multiples that they become: {target: {place: coefficient}}."""


class Vectors(ABC):
    """Of one length, in numbered places."""

    @abstractmethod
    def put(self, place: int, values: Vector) -> None: ...

    @abstractmethod
    def get(self, place: int) -> Vector: ...

    @abstractmethod
    def combine(self, combinations: Combinations) -> None:
        """All at once: each is made of what was there before."""

    @abstractmethod
    def dots(self, pairs: Sequence[Pair]) -> list[float]:
        """The products of places."""


class LocalVectors(Vectors):
    """In this process."""

    def __init__(self, places: int, length: int) -> None:
        self._vectors = [np.zeros(length) for _ in range(places)]

    def put(self, place: int, values: Vector) -> None:
        self._vectors[place] = np.array(values, dtype=np.float64)

    def get(self, place: int) -> Vector:
        return self._vectors[place]

    def combine(self, combinations: Combinations) -> None:
        made = {target: self._sum(terms) for target, terms in combinations.items()}
        for target, vector in made.items():
            self._vectors[target] = vector

    def _sum(self, terms: Mapping[int, float]) -> Vector:
        total = np.zeros_like(self._vectors[0])
        for place, coefficient in terms.items():
            total += self._vectors[place] * coefficient
        return total

    def dots(self, pairs: Sequence[Pair]) -> list[float]:
        with one_blas_thread():  # else the last bits depend on the number of cores
            return [float(self._vectors[a] @ self._vectors[b]) for a, b in pairs]

"""The last m steps and changes of the gradient, and the direction that they give.

The two loops of L-BFGS need nothing of the vectors but the products between them. So with these in
a small matrix, the direction is found as coefficients, and no vector is touched (Chen et al. 2014):

    direction = Σ aᵢ sᵢ + Σ bᵢ yᵢ + c g

Vectors are known by their places, which are the same wherever they are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

AT: Final = 0  # the parameters
BASE: Final = 1  # where the line search began
G: Final = 2  # the gradient at AT
BASE_G: Final = 3  # that at BASE
D: Final = 4  # the direction
FIRST_PAIR: Final = 5

Pair = tuple[int, int]


class History:
    """`size` pairs (s, y) at most; the oldest goes when there is another."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.order: list[int] = []  # of pairs, from the oldest to the newest
        self._products: dict[Pair, float] = {}

    def s(self, pair: int) -> int:
        """The place of a step."""
        return FIRST_PAIR + pair

    def y(self, pair: int) -> int:
        """The place of a change of the gradient."""
        return FIRST_PAIR + self.size + pair

    @property
    def places(self) -> int:
        """How many vectors there are, with AT to D."""
        return FIRST_PAIR + 2 * self.size

    @property
    def used(self) -> list[int]:
        """The places of all pairs that are kept."""
        return [place(pair) for place in (self.s, self.y) for pair in self.order]

    def next_pair(self) -> int:
        """Where the next one goes."""
        free = set(range(self.size)).difference(self.order)
        return min(free) if free else self.order[0]

    def add(self, pair: int) -> None:
        """`next_pair`, which is now in its place."""
        if pair in self.order:
            self.order.remove(pair)
        self.order.append(pair)

    def clear(self) -> None:
        self.order.clear()

    def wanted(self) -> list[Pair]:
        """The products that a new pair and a new gradient make necessary."""
        others = [*self.used, G]
        new = [G] if not self.order else [self.s(self.order[-1]), self.y(self.order[-1]), G]
        pairs = {(min(a, b), max(a, b)) for a in new for b in others}
        return [*sorted(pairs), (AT, AT)]

    def take(self, pairs: Iterable[Pair], values: Iterable[float]) -> None:
        self._products.update(zip(pairs, values, strict=True))

    def product(self, one: int, other: int) -> float:
        return self._products[min(one, other), max(one, other)]

    def direction(self) -> dict[int, float]:
        """The coefficient of each vector."""
        places = [*self.used, G]
        at = {place: number for number, place in enumerate(places)}
        products = np.array([[self.product(a, b) for b in places] for a in places])
        found = np.zeros(len(places))
        found[at[G]] = -1.0
        weights: dict[int, float] = {}
        for pair in reversed(self.order):
            s, y = at[self.s(pair)], at[self.y(pair)]
            weights[pair] = float(found @ products[s]) / products[s, y]
            found[y] -= weights[pair]
        if self.order:
            s, y = at[self.s(self.order[-1])], at[self.y(self.order[-1])]
            found *= products[s, y] / products[y, y]
        for pair in self.order:
            s, y = at[self.s(pair)], at[self.y(pair)]
            found[s] += weights[pair] - float(found @ products[y]) / products[s, y]
        return {place: float(found[at[place]]) for place in places}

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        kept = {*self.used, G, AT}
        products = [[a, b, value] for (a, b), value in self._products.items() if {a, b} <= kept]
        return {"order": list(self.order), "products": products}

    def load_state(self, order: Sequence[int], products: Iterable[tuple[int, int, float]]) -> None:
        self.order = list(order)
        self._products = {(a, b): value for a, b, value in products}

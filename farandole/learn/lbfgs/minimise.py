"""The iterations of L-BFGS. What is long stays where it is (`vectors`); here are only numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

from farandole.errors import DivergedError
from farandole.learn.lbfgs.history import AT, BASE, BASE_G, D, G, History
from farandole.learn.lbfgs.line_search import Point, noise, strong_wolfe
from farandole.learn.lbfgs.vectors import Vectors

_EPSILON = 2.0**-52


class Minimiser:
    """`evaluate` finds the loss at AT, and puts its gradient to G."""

    def __init__(
        self, vectors: Vectors, evaluate: Callable[[], float], history: History, tolerance: float
    ) -> None:
        self._vectors = vectors
        self._evaluate = evaluate
        self.history = history
        self._tolerance = tolerance
        self.loss = math.nan
        self.iteration = 0
        self.evaluations = 0

    def begin(self) -> None:
        """At the parameters that are there."""
        self.loss = self._at_x()
        self._know_products()
        if not math.isfinite(self.loss) or not math.isfinite(self.slope_norm):
            raise DivergedError(
                f"the loss at the first parameters is {self.loss}, and the length of its gradient "
                f"{self.slope_norm}. Give the model other parameters, or scale the data."
            )

    @property
    def slope_norm(self) -> float:
        """The length of the gradient."""
        return math.sqrt(self.history.product(G, G))

    @property
    def converged(self) -> bool:
        """Whether the gradient is short beside the parameters."""
        length = math.sqrt(self.history.product(AT, AT))
        return self.slope_norm <= self._tolerance * max(1.0, length)

    def iterate(self) -> bool:
        """One step; False if there is no lower point to be found any more."""
        start, norm = self._turn()
        if not start.slope < 0:
            return False
        first = 1.0 if self.history.order else min(1.0, 1.0 / self.slope_norm)
        self._vectors.combine({BASE: {AT: 1.0}, BASE_G: {G: 1.0}})
        last = start

        def at(step: float) -> Point:
            nonlocal last
            self._vectors.combine({AT: {BASE: 1.0, D: step}})
            loss = self._at_x()
            last = Point(step, loss, *self._vectors.dots([(D, G)]))
            return last

        found = strong_wolfe(at, start, first, norm)
        if found.step != last.step and found.step:
            at(found.step)  # the vectors are those of a worse point
        if not self._is_better(found, start):
            # As low as these numbers get: back to where the gradient is known.
            self._vectors.combine({AT: {BASE: 1.0}, G: {BASE_G: 1.0}})
            if not self.history.order:
                return False
            self.history.clear()  # the pairs may mislead; next comes the gradient itself
            self._know_products()
            return True
        self.loss = found.loss
        self.iteration += 1
        self._remember(found.step)
        return True

    def _is_better(self, found: Point, start: Point) -> bool:
        """Lower; or as low, and flatter."""
        if not found.step or not found.loss <= start.loss + noise(start):
            return False
        return found.loss < start.loss or (
            self._vectors.dots([(G, G)])[0] < self.history.product(G, G)
        )

    def _turn(self) -> tuple[Point, float]:
        """Finds the direction. The point where it begins, and its length."""
        self._vectors.combine({D: self.history.direction()})
        slope, square = self._vectors.dots([(D, G), (D, D)])
        if not slope < 0 and self.history.order:
            self.history.clear()
            return self._turn()
        return Point(0.0, self.loss, slope), math.sqrt(square)

    def _remember(self, step: float) -> None:
        """The step and the change of the gradient, if the loss curves upwards there."""
        history = self.history
        pair = history.next_pair()
        s, y = history.s(pair), history.y(pair)
        slope_before, slope = self._vectors.dots([(D, BASE_G), (D, G)])
        if slope > slope_before:
            self._vectors.combine({s: {D: step}, y: {G: 1.0, BASE_G: -1.0}})
            sy, yy = self._vectors.dots([(s, y), (y, y)])
            if sy > _EPSILON * yy:
                history.add(pair)
            elif pair in history.order:
                history.order.remove(pair)  # its place was taken
        self._know_products()

    def _know_products(self) -> None:
        pairs = self.history.wanted()
        self.history.take(pairs, self._vectors.dots(pairs))

    def _at_x(self) -> float:
        self.evaluations += 1
        return self._evaluate()

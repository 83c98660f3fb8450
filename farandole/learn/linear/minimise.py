"""Minimises a smooth function, each value of which is one pass over the data.

Newton's method takes few passes, and second derivatives: a matrix by the number of parameters.
L-BFGS takes more passes, and only gradients.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple, Protocol

import numpy as np
from scipy import optimize
from sklearn.exceptions import ConvergenceWarning

from farandole.learn.linear.moments import Array

_NEWTON_PARAMETERS = 500  # beyond that the second derivatives cost more than they save
SOLVERS = ("auto", "newton", "lbfgs")


class Objective(Protocol):
    """`curvature_size`: the rows of the matrix that a Newton step solves a system with."""

    @property
    def curvature_size(self) -> int: ...

    def at(self, weights: Array, *, curvature: bool) -> tuple[float, Array, Array | None]:
        """The value, the gradient and, if asked for, the second derivatives."""

    def step(self, gradient: Array, second: Array) -> Array:
        """Newton's, towards the minimum."""


class Minimum(NamedTuple):
    weights: Array
    iterations: int
    slope: float  # the largest part of the gradient
    converged: bool


def require_solver(name: str) -> None:
    if name not in SOLVERS:
        raise ValueError(f"solver={name!r}: known are 'auto', 'newton' and 'lbfgs'.")


def minimise(
    objective: Objective, start: Array, solver: str, tolerance: float, most: int
) -> Minimum:
    """Until no part of the gradient is above `tolerance`."""
    if solver == "auto":
        small = objective.curvature_size <= _NEWTON_PARAMETERS
        solver = "newton" if small else "lbfgs"
    method = newton if solver == "newton" else lbfgs
    return method(objective, start, tolerance, most)


def newton(objective: Objective, weights: Array, tolerance: float, most: int) -> Minimum:
    """With steps that are halved until the loss falls enough."""
    loss, gradient, second = objective.at(weights, curvature=True)
    for iteration in range(1, most + 1):
        slope = float(np.abs(gradient).max())
        if slope <= tolerance:
            return Minimum(weights, iteration - 1, slope, True)
        assert second is not None
        step = objective.step(gradient, second)
        expected = float((gradient * step).sum())
        length = 1.0
        while True:
            tried = weights + length * step
            new = objective.at(tried, curvature=True)
            if new[0] <= loss + 1e-4 * length * expected + 1e-15 * abs(loss) or length < 1e-10:
                break
            length /= 2
        weights, (loss, gradient, second) = tried, new
    slope = float(np.abs(gradient).max())
    return Minimum(weights, most, slope, slope <= tolerance)


def lbfgs(
    objective: Objective, start: Array, tolerance: float, most: int, values: int = 15_000
) -> Minimum:
    """Looks at no more than `values` points."""

    def value(flat: Array) -> tuple[float, Array]:
        loss, gradient, _ = objective.at(flat.reshape(start.shape), curvature=False)
        return loss, gradient.ravel()

    found = optimize.minimize(
        value,
        start.ravel(),
        jac=True,
        method="L-BFGS-B",
        options={
            "maxiter": most,
            "gtol": tolerance,
            "ftol": 0.0,
            "maxls": 50,
            "maxfun": values,
        },
    )
    slope = float(np.abs(found.jac).max())
    # A line search that cannot get any lower has met the limit of the numbers, not of `most`.
    ended = found.status == 0 or (found.status == 2 and slope <= 1e3 * tolerance)
    return Minimum(found.x.reshape(start.shape), int(found.nit), slope, bool(ended))


def warn_unless_converged(found: Minimum, level: int = 3) -> None:
    """On behalf of `fit`, whose caller is named: `level` calls above."""
    if not found.converged:
        warnings.warn(
            f"not converged after {found.iterations} iterations: the gradient is "
            f"{found.slope:.3g}. Raise max_iter or tol, or scale the columns.",
            ConvergenceWarning,
            stacklevel=level,
        )

"""`LBFGS`: minimises the loss of a torch model over all rows, whoever computes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
from torch import nn

from farandole.errors import UserError
from farandole.learn.lbfgs.checkpoint import FitCheckpoint
from farandole.learn.lbfgs.gradient import ModelSource
from farandole.learn.lbfgs.history import AT, History
from farandole.learn.lbfgs.minimise import Minimiser
from farandole.learn.lbfgs.model_loss import Loss, ModelLoss, require_mean
from farandole.learn.lbfgs.problem import LocalProblem, Problem, ServedProblem
from farandole.learn.pools.base import Placed
from farandole.learn.pools.choose import as_pool
from farandole.learn.progress import ShownProgress
from farandole.learn.sources.tables import in_memory

_LOOKED_AT = 64  # rows, to see whether the loss is a mean


class LBFGS:
    """`loss(model(x), y)` is the mean over the rows of a batch, as torch's losses are.

    The rows are cut into `pieces`, whatever the number of workers: results do not depend on who
    computes. Minimised is the mean over all rows plus `weight_decay` / 2 · ‖parameters‖². It ends
    when the gradient is no longer than `tolerance` · max(1, ‖parameters‖), after `max_iter`
    iterations, or when no lower point can be found.

    `servers`: a `farandole.server.Cluster`, or the address of its registrar and the key file. Then
    the parameters, the gradients and the `history` pairs are on these servers, and workers of the
    pool read and write them there.

    With a `checkpoint` file, the state is saved `every` so many iterations, and a fit goes on from
    what is there.
    """

    def __init__(
        self,
        loss: Loss,
        model: nn.Module,
        *,
        pool: Any = None,
        servers: Any = None,
        history: int = 10,
        weight_decay: float = 0.0,
        max_iter: int = 100,
        tolerance: float = 1e-6,
        pieces: int = 32,
        checkpoint: str | Path | None = None,
        every: int = 1,
        verbose: bool = False,
    ) -> None:
        for name, value in (("history", history), ("pieces", pieces), ("every", every)):
            if value < 1:
                raise UserError(f"{name}={value}: it is 1 or more.")
        if not (0 <= weight_decay < np.inf and tolerance >= 0 and max_iter >= 0):
            raise UserError(
                f"weight_decay={weight_decay}, tolerance={tolerance}, max_iter={max_iter}: each is "
                "0 or more."
            )
        self.model = model
        self._function = ModelLoss(loss, model)
        self._pool = pool
        self._servers = servers
        self._history = history
        self._weight_decay = weight_decay
        self._max_iter = max_iter
        self._tolerance = tolerance
        self._pieces = pieces
        self._checkpoint = None if checkpoint is None else Path(checkpoint)
        self._every = every
        self._verbose = verbose

    def fit(self, X: Any, y: Any = None) -> Self:
        """Of rows X and targets y, which the model's parameters then fit.

        Sets `loss_`, `losses_` (after each iteration), `n_iter_`, `n_evaluations_`, `converged_`
        and `report_`. The parameters are those of the last iteration also if it is interrupted.
        """
        source = self._source(X, y)
        start = self._function.vector_of(self.model)
        looked_at = slice(0, min(source.rows, _LOOKED_AT))
        first_y = None if source.y is None else np.asarray(source.y[looked_at])
        require_mean(self._function, start, np.asarray(source.X[looked_at]), first_y)
        history = History(self._history)
        with (
            as_pool(self._pool).place(source) as placed,
            self._shown(placed),
            self._problem(placed, history) as problem,
        ):
            problem.vectors.put(AT, start)
            minimiser = Minimiser(problem.vectors, problem.evaluate, history, self._tolerance)
            try:
                self._iterate(minimiser, problem, placed)
            finally:
                self.report_ = placed.report
        if not self.converged_:
            warnings.warn(
                f"not converged after {self.n_iter_} iterations: the length of the gradient is "
                f"{minimiser.slope_norm:.3g}. Raise max_iter or tolerance.",
                stacklevel=2,
            )
        return self

    def _source(self, X: Any, y: Any) -> ModelSource:
        X, y = in_memory(X), in_memory(y)
        X = X if hasattr(X, "shape") else np.asarray(X)
        y = y if y is None or hasattr(y, "shape") else np.asarray(y)
        rows = int(X.shape[0]) if len(X.shape) else 0
        if not rows:
            raise UserError(f"X has the shape {tuple(X.shape)}: there are no rows to fit.")
        if y is not None and int(y.shape[0]) != rows:
            raise UserError(f"X has {rows} rows, and y has {y.shape[0]}.")
        return ModelSource(X, y, chunk_rows=-(-rows // self._pieces), one_by_one=True)

    @contextmanager
    def _shown(self, placed: Placed) -> Iterator[None]:
        if self._verbose:
            placed.progress = ShownProgress(type(self).__name__)
        try:
            yield
        finally:
            placed.progress.end()

    @contextmanager
    def _problem(self, placed: Placed, history: History) -> Iterator[Problem]:
        """What is minimised, and where its vectors are."""
        if self._servers is None:
            yield LocalProblem(self._function, placed, history, self._weight_decay)
            return
        with ServedProblem(
            self._function, placed, history, self._weight_decay, self._servers
        ) as problem:
            yield problem

    def _iterate(self, minimiser: Minimiser, problem: Problem, placed: Placed) -> None:
        vectors = problem.vectors
        saved = self._saved(placed)
        losses = saved.load(minimiser, vectors) if saved else None
        if losses is None:
            minimiser.begin()
            losses = [minimiser.loss]
        try:
            while not minimiser.converged and minimiser.iteration < self._max_iter:
                before = minimiser.iteration
                if not minimiser.iterate():
                    break
                if minimiser.iteration == before:
                    continue
                losses.append(minimiser.loss)
                placed.progress.note(f"iteration {minimiser.iteration}, loss {minimiser.loss:.6g}")
                if saved and minimiser.iteration % self._every == 0:
                    saved.save(minimiser, vectors, losses)
        finally:
            self._function.load(vectors.get(AT), self.model)
        self.loss_, self.losses_ = minimiser.loss, losses
        self.n_iter_, self.n_evaluations_ = minimiser.iteration, minimiser.evaluations
        self.converged_ = minimiser.converged
        if saved:
            saved.save(minimiser, vectors, losses)

    def _saved(self, placed: Placed) -> FitCheckpoint | None:
        if self._checkpoint is None:
            return None
        task = {
            "rows": placed.source.rows,
            "pieces": self._pieces,
            "history": self._history,
            "weight_decay": self._weight_decay,
            "parameters": {name: list(shape) for name, shape in self._function.shapes.items()},
        }
        return FitCheckpoint(self._checkpoint, task)

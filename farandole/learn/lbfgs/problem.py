"""The loss with its penalty at the parameters in AT, and its gradient in G: here, or on servers."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Self

import numpy as np

from farandole.errors import UserError
from farandole.learn.lbfgs.gradient import GradientSum
from farandole.learn.lbfgs.history import AT, G, History
from farandole.learn.lbfgs.model_loss import ModelLoss
from farandole.learn.lbfgs.served_gradient import ServedGradientSum, ServedTable
from farandole.learn.lbfgs.served_vectors import ServedVectors
from farandole.learn.lbfgs.vectors import LocalVectors, Vectors
from farandole.learn.pools.base import Placed
from farandole.learn.pools.dispatched import Dispatched
from farandole.server import Cluster, Store


class Problem(ABC):
    """The mean loss of all rows plus `weight_decay` / 2 · ‖parameters‖²."""

    vectors: Vectors

    def __init__(self, placed: Placed, weight_decay: float) -> None:
        self._placed = placed
        self._rows = placed.source.rows
        self._weight_decay = weight_decay

    def evaluate(self) -> float:
        """The loss at AT. Its gradient is then in G."""
        loss = self._sum() / self._rows
        if self._weight_decay:
            loss += 0.5 * self._weight_decay * self.vectors.dots([(AT, AT)])[0]
        return loss

    @abstractmethod
    def _sum(self) -> float:
        """The sum of the losses, without the penalty. Puts the whole gradient to G."""


class LocalProblem(Problem):
    """The vectors are in this process, and gradients come back through the pool."""

    def __init__(
        self, function: ModelLoss, placed: Placed, history: History, weight_decay: float
    ) -> None:
        super().__init__(placed, weight_decay)
        self.vectors = LocalVectors(history.places, function.length)
        self._job = GradientSum(function)

    def _sum(self) -> float:
        at = self.vectors.get(AT)
        total, gradient = self._placed.sum(self._job, at)
        with np.errstate(invalid="ignore"):  # the caller looks whether they are finite
            self.vectors.put(G, gradient / self._rows + self._weight_decay * at)
        return float(total)


class ServedProblem(Problem):
    """The vectors are on servers. The pool must be of workers that are other processes."""

    def __init__(
        self,
        function: ModelLoss,
        placed: Placed,
        history: History,
        weight_decay: float,
        servers: Any,
    ) -> None:
        super().__init__(placed, weight_decay)
        if not isinstance(placed, Dispatched) or placed.workers_are_threads:
            raise UserError(
                "servers= is for a pool of other processes, which read and write the vectors "
                "there: a number of processes, Ray or Dask. Threads, also those of an executor, "
                "and ranks have the vectors in memory: leave servers= out, or give pool=NUMBER."
            )
        self._cluster = servers if isinstance(servers, Cluster) else None
        address, key_file = _address(servers)
        self._table = ServedTable(address, key_file, f"lbfgs {uuid.uuid4().hex}", history.places)
        self._function = function
        self._evaluation = 0
        self._store = Store(address, key_file)
        try:
            places = history.places + placed.source.chunks
            self.vectors = ServedVectors(self._store, self._table.name, places, function.length)
        except BaseException:
            self._store.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()

    def _sum(self) -> float:
        if self._cluster is not None:
            self._cluster.check()  # replaces servers that have died
        self._evaluation += 1
        job = ServedGradientSum(self._function, self._table, self._evaluation)
        total = self._placed.sum(job)
        first, share = self._table.first_slot, 1.0 / self._rows
        terms = {first + chunk: share for chunk in range(self._placed.source.chunks)}
        if self._weight_decay:
            terms[AT] = self._weight_decay
        self.vectors.combine({G: terms})
        return float(total)


def _address(servers: Any) -> tuple[str, Path]:
    if isinstance(servers, Cluster):
        return servers.address, Path(servers.key_file).resolve()
    try:
        address, key_file = servers
        return str(address), Path(key_file).resolve()
    except (TypeError, ValueError) as error:
        raise UserError(
            f"servers={servers!r}: give a farandole.server.Cluster, or (address, key_file)."
        ) from error

"""The gradient by way of parameter servers: workers read the parameters there, and put the gradient
of each chunk there, into a slot of its own. Only the losses come back through the pool.

Slots are added up in the order of chunks, so that it does not matter who computed which, and when.
Two workers may have the same chunk, and one of them may be very late: puts have the number of the
evaluation as their stamp, and one that is not newer than what is there changes nothing.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from farandole.learn.lbfgs.history import AT
from farandole.learn.lbfgs.model_loss import ModelLoss
from farandole.learn.lbfgs.vectors import Vector
from farandole.learn.sources.chunk import Chunk
from farandole.learn.sums.sum import Statistics, Sum, as_statistics
from farandole.server import Store


@dataclass(frozen=True)
class ServedTable:
    """Where the vectors are. Travels to workers, which must be able to read the key file."""

    address: str
    key_file: Path
    name: str
    first_slot: int  # of the gradients of chunks


class ServedGradientSum(Sum):
    """`evaluation` counts from 1."""

    def __init__(self, function: ModelLoss, table: ServedTable, evaluation: int) -> None:
        self._function = function
        self._table = table
        self._evaluation = evaluation

    def map(self, chunk: Chunk, state: Any) -> Statistics:
        connection = _CONNECTIONS.to(self._table)
        at = connection.parameters(self._evaluation)
        loss, gradient = self._function.at(at, chunk.given, chunk.y)
        connection.put(chunk.number, gradient * chunk.rows, self._evaluation)
        return as_statistics(loss=loss * chunk.rows)

    def finish(self, statistics: Statistics, state: Any) -> float:
        """The sum of the losses of all rows."""
        return float(statistics["loss"])


class _Connection:
    """One thread's, to one table."""

    def __init__(self, table: ServedTable) -> None:
        self.table = table
        self.store = Store(table.address, table.key_file)
        self.store.find(table.name)
        self._known: tuple[int, Vector] | None = None

    def parameters(self, evaluation: int) -> Vector:
        """Fetched once in each evaluation: several chunks follow each other."""
        if self._known is None or self._known[0] != evaluation:
            values: torch.Tensor = self.store.start_get(self.table.name, slot=AT).wait()
            self._known = evaluation, values.view(-1).numpy()
        return self._known[1]

    def put(self, chunk: int, gradient: Vector, evaluation: int) -> None:
        slot = self.table.first_slot + chunk
        values = torch.from_numpy(gradient)
        self.store.start_put(self.table.name, values, slot=slot, stamp=evaluation).wait()


class _Connections(threading.local):
    """The last one of each thread is kept for the next chunk."""

    current: _Connection | None = None

    def to(self, table: ServedTable) -> _Connection:
        if self.current is None or self.current.table != table:
            if self.current is not None:
                self.current.store.close()
                self.current = None
            self.current = _Connection(table)
        return self.current


_CONNECTIONS = _Connections()

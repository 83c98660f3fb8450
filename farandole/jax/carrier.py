"""Carries arrays between ranks, for callbacks of JAX's runtime and for eager calls.

Vectors that come again and again lie in memory that the ranks of a host share, if the transport has
such: then an all-reduce copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from farandole.comm import Group, Op
from farandole.comm.buffers import from_buffer, to_array
from farandole.jax.trees import Leaf, require_same_tree
from farandole.train.current_run import current
from farandole.train.run import Run

_KEPT = 16  # vectors whose memory is kept


class Carrier:
    """Of one group. All ranks call every method in the same order."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._kept: dict[tuple[torch.dtype, int], torch.Tensor] = {}
        self._registered: list[AbstractContextManager[object]] = []
        self._agreed: set[tuple[Leaf, ...]] = set()

    @property
    def group(self) -> Group:
        return self._run.group

    def agree(self, leaves: tuple[Leaf, ...]) -> None:
        """Compares the trees of all ranks, the first time that this rank has this one."""
        if leaves not in self._agreed:
            require_same_tree(leaves, self.group)
            self._agreed.add(leaves)

    def reduce(
        self, arrays: Sequence[Any], op: Op, *, weighed: bool = False
    ) -> list[np.ndarray[Any, Any]]:
        """All arrays of a dtype in one collective. The results are valid until the next call.

        `weighed`: each rank's count by its batch.
        """
        given = [from_buffer(array) for array in arrays]
        weight = self._run.other_loop.batch_weight if weighed else 1.0
        results: dict[int, torch.Tensor] = {}
        for kind in dict.fromkeys(tensor.dtype for tensor in given):
            at = [index for index, tensor in enumerate(given) if tensor.dtype == kind]
            counts = [given[index].numel() for index in at]
            buffer = self._buffer(kind, sum(counts))
            parts = buffer.split(counts)
            for index, part in zip(at, parts, strict=True):
                results[index] = part.view(given[index].shape).copy_(given[index])
            if weight != 1.0:
                buffer.mul_(weight)
            self.group.all_reduce(buffer, op)
        return [to_array(results[index]) for index in range(len(given))]

    def broadcast(self, vector: Any, source: int) -> np.ndarray[Any, Any]:
        return to_array(self.group.broadcast(from_buffer(vector).clone(), source))

    def _buffer(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        known = self._kept.get((dtype, count))
        if known is None:
            known = torch.empty(count, dtype=dtype)
            if len(self._kept) < _KEPT and self.group.size > 1:
                self._registered.append(self.group.register(known))
                self._kept[dtype, count] = known
        return known


_CARRIERS: dict[int, Carrier] = {}


def carrier() -> Carrier:
    """That of this process's run."""
    run = current()
    known = _CARRIERS.get(id(run))
    if known is None:
        known = _CARRIERS[id(run)] = Carrier(run)
    return known

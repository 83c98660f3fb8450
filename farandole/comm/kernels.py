"""Copies and sums by the library whose calls cost least.

A call of PyTorch's costs about 3 µs before it touches a number, and spreads long vectors over the
threads of the process. A call of NumPy's costs about 1 µs and computes alone. Element by element
both do the same IEEE operations, so the bits of sums, products and averages do not depend on which
is taken; those of a NaN, or of the smaller of two zeros, may. Where several ranks compute the same
element, all must therefore take the same library: the choice may depend on sizes alone.
"""

from __future__ import annotations

import contextvars
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from farandole.comm.arithmetic import Op, reduce_into

SHORT_BYTES = 2**17  # up to there PyTorch, too, computes in one thread
_NUMPY_DTYPES = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})
_NUMPY_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "sum": np.add,
    "average": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
}


class Kernels(ABC):
    """What one library does with flat arrays: its own, which `of` makes from tensors."""

    @abstractmethod
    def of(self, tensor: torch.Tensor) -> Any:
        """The same memory, as this library sees it."""

    @abstractmethod
    def copy(self, into: Any, source: Any) -> None:
        """Overwrites one array with another of the same length and dtype."""

    @abstractmethod
    def reduce(self, out: Any, parts: Sequence[Any], op: Op) -> None:
        """Two or more parts, combined in the order given, into `out`.

        `out` may be the first or the second of them.
        """


class _Torch(Kernels):
    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        into.copy_(source)

    def reduce(self, out: torch.Tensor, parts: Sequence[torch.Tensor], op: Op) -> None:
        reduce_into(out, parts, op)


class _Quiet(threading.local):
    """A context, in each thread, in which NumPy does not warn of infinities, as PyTorch does not.

    `np.errstate` does the same, but to enter and to leave it takes longer than to add.
    """

    def __init__(self) -> None:
        self.context = contextvars.copy_context()
        self.context.run(np.seterr, all="ignore")


class _Numpy(Kernels):
    def __init__(self) -> None:
        self._quiet = _Quiet()

    def of(self, tensor: torch.Tensor) -> Any:
        return tensor.numpy()

    def copy(self, into: Any, source: Any) -> None:
        np.copyto(into, source)

    def reduce(self, out: Any, parts: Sequence[Any], op: Op) -> None:
        self._quiet.context.run(_reduce_by_numpy, out, parts, op)


def _reduce_by_numpy(out: Any, parts: Sequence[Any], op: Op) -> None:
    function = _NUMPY_FUNCTIONS[op]
    function(parts[0], parts[1], out=out)
    for part in parts[2:]:
        function(out, part, out=out)
    if op == "average":
        np.divide(out, len(parts), out=out)


_TORCH, _NUMPY = _Torch(), _Numpy()
# Before NumPy 2 what it warns of belongs to a thread, not to a context: to the user's.
_QUIET_DTYPES = _NUMPY_DTYPES if int(np.__version__.split(".")[0]) >= 2 else frozenset()


def for_short(dtype: torch.dtype, nbytes: int) -> Kernels:
    """The same on all ranks, for vectors that all of them add up."""
    return _NUMPY if nbytes <= SHORT_BYTES and dtype in _QUIET_DTYPES else _TORCH


def for_this_thread(dtype: torch.dtype) -> Kernels:
    """For vectors that one rank adds up: with all threads that this one may use."""
    alone = torch.get_num_threads() == 1
    return _NUMPY if alone and dtype in _QUIET_DTYPES else _TORCH

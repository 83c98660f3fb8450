"""PowerSGD (Vogels et al., 2019): a matrix travels as the product of two narrow ones.

    M ≈ P Qᵀ      M: m × n      P: m × rank      Q: n × rank

    1. P = Σ M Q          one step of the power iteration, from the Q of the last call
    2. P orthonormal      on every rank for itself, from the same bits to the same bits
    3. Q = Σ Mᵀ P         which projects every rank's M onto the columns of P
    4. result P Qᵀ        a rank has left out M − P (Mᵀ P)ᵀ, which it adds to its next M

Both sums are plain ones, so the bytes do not grow with the number of ranks. Tensors of more than
two dimensions are matrices of their first dimension by all others; vectors travel raw.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from farandole.comm.codecs.codec import Codec, check_at_least
from farandole.comm.codecs.compressor import LEFT, Compressor, Contribution, Outcome
from farandole.comm.codecs.shared_random import shared_random
from farandole.comm.group import Group
from farandole.comm.meter import ring_bytes

_Q = "q"
_STEP = "step"
_NEGLIGIBLE = 1e-12  # of a column's length: what is left of it is rounding, not direction


@dataclass(frozen=True)
class PowerSgd(Codec):
    """Matrices of low rank."""

    name: ClassVar[str] = "powersgd"

    rank: int = 2  # columns of the narrow matrices
    warm_steps: int = 0  # for so many steps everything travels raw
    feedback: bool = True  # add what the low rank left out to the next gradient

    def __post_init__(self) -> None:
        check_at_least(self.name, "rank", self.rank, 1)
        check_at_least(self.name, "warm_steps", self.warm_steps, 0)

    def build(self, algorithm: str = "auto") -> Compressor:
        return _PowerSgdAtWork(self, algorithm)

    def encoded_bytes(self, shape: Sequence[int], itemsize: int, ranks: int) -> int:
        """After the warm steps."""
        high, wide = _matrix(shape)
        columns = min(self.rank, high, wide)
        return ring_bytes((high + wide) * columns * max(itemsize, 4), ranks)


class _PowerSgdAtWork(Compressor):
    codec: PowerSgd

    def _sum(
        self, parts: Mapping[str, Contribution], raw: Sequence[torch.Tensor], group: Group
    ) -> tuple[dict[str, Outcome], list[torch.Tensor]]:
        warm = {
            name: part
            for name, part in parts.items()
            if part.memory.get(_STEP, 0) < self.codec.warm_steps
        }
        ready = {name: part for name, part in parts.items() if name not in warm}
        matrices = [part.values.view(_matrix(part.shape)) for part in ready.values()]
        old_qs = [self._start(name, part) for name, part in ready.items()]
        own_ps = [matrix @ q for matrix, q in zip(matrices, old_qs, strict=True)]
        for part, own_p in zip(ready.values(), own_ps, strict=True):
            if not part.is_finite:
                own_p.fill_(math.nan)  # a product may hide it: it must be known to all
        as_it_is = [part.values for part in warm.values()]
        sums = self._sum_raw([*own_ps, *as_it_is, *raw], group)
        ps = [_orthonormal(p) for p in sums[: len(ready)]]
        own_qs = [matrix.T @ p for matrix, p in zip(matrices, ps, strict=True)]
        qs = self._sum_raw(own_qs, group)

        outcomes = {
            name: Outcome(total, {_STEP: part.memory.get(_STEP, 0) + 1})
            for (name, part), total in zip(warm.items(), sums[len(ready) :], strict=False)
        }
        for index, (name, part) in enumerate(ready.items()):
            p, q = ps[index], qs[index]
            memory = {_STEP: part.memory.get(_STEP, 0), _Q: _next_start(q, old_qs[index])}
            if self.codec.feedback:
                memory[LEFT] = torch.addmm(matrices[index], p, own_qs[index].T, alpha=-1).view(-1)
            outcomes[name] = Outcome(_product(p, q).view(-1), memory)
        return outcomes, sums[len(parts) :]

    def _start(self, name: str, part: Contribution) -> torch.Tensor:
        """The Q of the last call, or a random one that is the same on every rank."""
        if _Q in part.memory:
            q: torch.Tensor = part.memory[_Q]
            return q
        high, wide = _matrix(part.shape)
        drawn = shared_random(name).standard_normal((wide, min(self.codec.rank, high, wide)))
        return torch.from_numpy(drawn).to(part.values)


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    high, *others = shape or (1,)
    return high, math.prod(others)


def _orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Gram–Schmidt, twice over for precision; a column that depends on earlier ones becomes zero.

    In NumPy, whose sums have the same bits in any number of threads: a rank with more cores than
    another must not end with another model.
    """
    columns = matrix.T.cpu().double().numpy().copy()
    with np.errstate(all="ignore"):  # of inf and NaN comes NaN, which is dealt with later
        for index, column in enumerate(columns):
            before = math.sqrt((column * column).sum())
            for _ in range(2):
                for earlier in columns[:index]:
                    column -= (earlier * column).sum() * earlier
            length = math.sqrt((column * column).sum())
            column /= math.inf if length <= _NEGLIGIBLE * before else length
    return torch.from_numpy(columns.T).to(matrix).contiguous()


def _next_start(q: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Q's columns at length about 1: else M Q would be as small, or large, as the square of M.

    A column that has vanished would never come back, so that the old one stays.
    """
    largest = q.abs().amax(dim=0)
    return torch.where(largest > 0, q / largest, old)


def _product(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """P Qᵀ, one column at a time, for the same reason: a BLAS may add in another order."""
    total = p[:, 0, None] * q[:, 0]
    for column in range(1, p.shape[1]):
        total += p[:, column, None] * q[:, column]
    return total

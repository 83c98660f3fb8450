"""Sixteen bits for each number, and a common power of two for each row.

Gradients are often so small that float16 would round them to zero, and now and then too large for
it. The power of two, chosen from the largest number of a row, brings them where float16 is precise.
It costs nothing in accuracy, and nothing overflows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from farandole.comm.codecs.codec import Codec
from farandole.comm.codecs.compressor import Compressor
from farandole.comm.codecs.two_phase import TwoPhase, two_phase_bytes
from farandole.comm.codecs.wire import Column, largest_size

_TOP_EXPONENT = 15  # scaled numbers are below 2 ** 15; float16 ends just below 2 ** 16
_LEAST_EXPONENT = -126  # of float32: below, a scale would lose its only bit


class _Halves(Codec):
    dtype: ClassVar[torch.dtype]

    def build(self, algorithm: str = "auto") -> Compressor:
        # No error feedback: what rounding loses is in the noise of any gradient.
        return TwoPhase(self, _HalfCoder(self.dtype), feedback=False, algorithm=algorithm)

    def encoded_bytes(self, shape: Sequence[int], itemsize: int, ranks: int) -> int:
        return two_phase_bytes(_HalfCoder(self.dtype), math.prod(shape), itemsize, ranks)


@dataclass(frozen=True)
class Fp16(_Halves):
    """float16: 11 bits of precision."""

    name: ClassVar[str] = "fp16"
    dtype: ClassVar[torch.dtype] = torch.float16


@dataclass(frozen=True)
class Bf16(_Halves):
    """bfloat16: 8 bits of precision, and the range of float32 inside a row."""

    name: ClassVar[str] = "bf16"
    dtype: ClassVar[torch.dtype] = torch.bfloat16


class _HalfCoder:
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def columns(self, count: int, precise: torch.dtype) -> Sequence[Column]:
        return [(precise, 1), (self._dtype, count)]

    def encode(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        largest = largest_size(rows)
        exponent = (torch.frexp(largest).exponent - _TOP_EXPONENT).clamp_(min=_LEAST_EXPONENT)
        scale = torch.ldexp(torch.ones_like(largest), exponent)
        scale.masked_fill_(~torch.isfinite(largest), math.nan)
        return [scale, _to_half(rows / scale, self._dtype)]

    def decode(self, columns: Sequence[torch.Tensor], count: int) -> torch.Tensor:
        scale, values = columns
        return _from_half(values, scale.dtype).mul_(scale)


def _to_half(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """On a CPU, NumPy rounds to float16 ten times as fast as torch does, to the same bits."""
    if dtype == torch.float16 and values.device.type == "cpu":
        return torch.from_numpy(values.numpy().astype(np.float16))
    return values.to(dtype)


def _from_half(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if values.dtype == torch.float16 and values.device.type == "cpu":
        kind = np.float64 if dtype == torch.float64 else np.float32
        return torch.from_numpy(values.numpy().astype(kind))
    return values.to(dtype)

"""One bit for each number, and their mean size for each row: signSGD with error feedback.

The owner of a row averages the scaled signs of all ranks and passes on the signs of that, so the
bytes do not grow with the number of ranks. Without feedback this is a majority vote.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from farandole.comm.codecs.codec import Codec
from farandole.comm.codecs.compressor import Compressor
from farandole.comm.codecs.two_phase import TwoPhase, two_phase_bytes
from farandole.comm.codecs.wire import Column, pad_end

_BITS = 8


@dataclass(frozen=True)
class Sign(Codec):
    """Plus or minus the mean size; a zero too has a sign."""

    name: ClassVar[str] = "sign"

    feedback: bool = True  # add what the signs left out to the next gradient

    def build(self, algorithm: str = "auto") -> Compressor:
        return TwoPhase(self, _SignCoder(), feedback=self.feedback, algorithm=algorithm)

    def encoded_bytes(self, shape: Sequence[int], itemsize: int, ranks: int) -> int:
        return two_phase_bytes(_SignCoder(), math.prod(shape), itemsize, ranks)


class _SignCoder:
    """A row is cut into eight planes; bit i of byte j is the sign of number j of plane i.

    So bits are packed by whole planes, in a few operations on contiguous memory.
    """

    def columns(self, count: int, precise: torch.dtype) -> Sequence[Column]:
        return [(precise, 1), (torch.uint8, -(-count // _BITS))]

    def encode(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        scale = rows.abs().mean(dim=1, keepdim=True)
        first, *others = pad_end(_is_minus(rows), -rows.shape[1] % _BITS).chunk(_BITS, dim=1)
        packed = first.clone()
        for bit, plane in enumerate(others, start=1):
            packed |= plane << bit
        return [scale, packed]

    def decode(self, columns: Sequence[torch.Tensor], count: int) -> torch.Tensor:
        scale, packed = columns
        minus = torch.cat([(packed >> bit) & 1 for bit in range(_BITS)], dim=1)[:, :count]
        return minus.to(scale.dtype).mul_(-2 * scale).add_(scale)


def _is_minus(rows: torch.Tensor) -> torch.Tensor:
    """1 where the sign bit is set, else 0: in half the time of a comparison."""
    whole, place = (torch.int64, 63) if rows.dtype == torch.float64 else (torch.int32, 31)
    return (rows.view(whole) >> place).to(torch.uint8) & 1

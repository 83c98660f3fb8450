"""Eight bits for each number, scaled by the largest of its block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from farandole.comm.codecs.codec import Codec, check_at_least
from farandole.comm.codecs.compressor import Compressor
from farandole.comm.codecs.two_phase import TwoPhase, two_phase_bytes
from farandole.comm.codecs.wire import Column, largest_size, pad_end

_LARGEST = 127


@dataclass(frozen=True)
class Int8(Codec):
    """Whole numbers from −127 to 127, with a scale for every `block` of them."""

    name: ClassVar[str] = "int8"

    block: int = 256  # elements that share a scale
    feedback: bool = True  # add what rounding left out to the next gradient

    def __post_init__(self) -> None:
        check_at_least(self.name, "block", self.block, 1)

    def build(self, algorithm: str = "auto") -> Compressor:
        return TwoPhase(self, _Int8Coder(self.block), feedback=self.feedback, algorithm=algorithm)

    def encoded_bytes(self, shape: Sequence[int], itemsize: int, ranks: int) -> int:
        return two_phase_bytes(_Int8Coder(self.block), math.prod(shape), itemsize, ranks)


class _Int8Coder:
    def __init__(self, block: int) -> None:
        self._block = block

    def columns(self, count: int, precise: torch.dtype) -> Sequence[Column]:
        return [(precise, -(-count // self._block)), (torch.int8, count)]

    def encode(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        blocks = self._blocks(rows)
        scales = largest_size(blocks) / _LARGEST
        # What is next to nothing is nothing: one over its scale would be inf. (NaN stays NaN.)
        scales.masked_fill_(scales < torch.finfo(rows.dtype).tiny, 0)
        inverse = scales.reciprocal().masked_fill_(scales == 0, 0)
        # NaN has no code; its block's scale is NaN too, so that any will do.
        codes = (blocks * inverse).round_().to(torch.int8)
        return [scales.flatten(1), codes.flatten(1)[:, : rows.shape[1]]]

    def decode(self, columns: Sequence[torch.Tensor], count: int) -> torch.Tensor:
        scales, codes = columns
        blocks = self._blocks(codes.to(scales.dtype)).mul_(scales.unsqueeze(2))
        return blocks.flatten(1)[:, :count]

    def _blocks(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows × blocks × elements; zeros fill up the last block."""
        padded = pad_end(rows, -rows.shape[1] % self._block)
        return padded.view(rows.shape[0], -1, self._block)

"""Tensors of several dtypes side by side in one row of bytes, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

_ALIGNMENT_BYTES = 8  # of the largest dtype: so that bytes can be seen as numbers where they lie

Column = tuple[torch.dtype, int]
"""What one part of a row holds: this many elements of this dtype."""


def packed_bytes(columns: Sequence[Column]) -> int:
    """The length of a row."""
    return sum(_aligned(count * dtype.itemsize) for dtype, count in columns)


def pack(*columns: torch.Tensor) -> torch.Tensor:
    """Matrices with equally many rows, as one matrix of bytes."""
    parts = []
    for column in columns:
        raw = column.contiguous().view(torch.uint8)
        parts.append(pad_end(raw, _aligned(raw.shape[1]) - raw.shape[1]))
    return torch.cat(parts, dim=1)


def unpack(rows: torch.Tensor, columns: Sequence[Column]) -> list[torch.Tensor]:
    """The matrices that `pack` was given, as views."""
    found, begin = [], 0
    for dtype, count in columns:
        end = begin + count * dtype.itemsize
        found.append(rows[:, begin:end].view(dtype))
        begin += _aligned(end - begin)
    return found


def pad_end(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """With `count` zeros at the end of each row; the tensor itself, not a copy, when that is 0."""
    return F.pad(tensor, (0, count)) if count else tensor


def largest_size(rows: torch.Tensor) -> torch.Tensor:
    """Of the last dimension, without a copy of all sizes; NaN where there is one."""
    return torch.maximum(rows.amax(-1, keepdim=True), -rows.amin(-1, keepdim=True))


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

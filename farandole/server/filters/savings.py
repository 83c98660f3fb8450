"""How much a filter has saved."""

from __future__ import annotations

from dataclasses import dataclass

import torch

ROW_NUMBER_BYTES = 8


@dataclass
class Savings:
    """What was offered to a filter so far, and what of it was sent."""

    bytes_offered: int = 0
    bytes_sent: int = 0
    rows_offered: int = 0
    rows_sent: int = 0


def push_bytes(count: int, rows: int, width: int, dtype: torch.dtype) -> int:
    """Bytes of a push of `count` of a table's `rows`: if those are not all, with their numbers."""
    numbers = 0 if count == rows else count * ROW_NUMBER_BYTES
    return count * width * dtype.itemsize + numbers

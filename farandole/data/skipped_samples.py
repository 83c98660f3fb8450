"""Counts the samples that were left out because they could not be decoded."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Final

import torch

from farandole.comm import Group

_SHOWN: Final = 10


class SkippedSamples:
    """Of the pass under way, on this rank. The first few are named, all are counted."""

    def __init__(self) -> None:
        self.may_happen = False  # the pass reads data of which samples are skipped: on all ranks
        self._count = 0
        self._named = 0

    def add(self, reasons: Sequence[str], *, counts: bool) -> None:
        """Those of one batch; in an evaluation they are named only."""
        self._count += len(reasons) if counts else 0
        for reason in reasons[: _SHOWN - self._named]:
            self._named += 1
            last = " Others are counted, and not named." if self._named == _SHOWN else ""
            warnings.warn(f"skipped: {reason}{last}", stacklevel=2)

    def total(self, group: Group) -> int:
        """*Together.* Of all ranks of `group`, since the last call."""
        own, self._count, self.may_happen = self._count, 0, False
        return int(group.all_reduce(torch.tensor([own])))

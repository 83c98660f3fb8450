"""Autotuning: tries how much to fuse, and when to begin, while training goes on; keeps the best.

What counts is how many bytes of gradients get through in a second of training, whatever else that
second is spent on. Each setting is tried for a while, in turns, so that a machine that gets slower
meanwhile does not favour the first; of the times that each had its turn, the median counts.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from farandole.errors import UserError

_MIB = 2**20
_FUSION_MIB = (2, 8, 64)
_BEGIN_MIB = (1, 8, 25, 1024)
_TURNS = 3
_TURN_SECONDS = 2.0


class Tuned(NamedTuple):
    """Up to `fusion_bytes` are reduced in one go. Gradients are begun with when `begin_bytes` have
    come together, or when somebody waits for them."""

    fusion_bytes: int
    begin_bytes: int


CHOICES = tuple(
    Tuned(fusion * _MIB, begin * _MIB)
    for fusion, begin in itertools.product(_FUSION_MIB, _BEGIN_MIB)
)


class FusionTuner:
    """On rank 0, which tells the others. Told of what was reduced, it says what to use next."""

    def __init__(self, log: Path | None, turn_seconds: float = _TURN_SECONDS) -> None:
        self.chosen: Tuned | None = None
        self._log = log
        self._turn_seconds = turn_seconds
        self._plan: Iterator[Tuned] = itertools.chain.from_iterable([CHOICES] * _TURNS)
        self._scores: dict[Tuned, list[float]] = {choice: [] for choice in CHOICES}
        self._trying: Tuned | None = None
        self._since: float | None = None
        self._nbytes = 0
        self._note("fusion_mb,begin_mb,mb_per_second", mode="w")

    def saw(self, nbytes: int, now: float | None = None) -> Tuned | None:
        """So much was reduced. Returns what all ranks shall use from now on, if it changes."""
        now = time.monotonic() if now is None else now
        if self.chosen is not None:
            return None
        if self._since is None:
            self._since = now  # a turn begins with the end of something
            return None
        self._nbytes += nbytes
        if now - self._since < self._turn_seconds:
            return None
        if self._trying is not None:  # what came before the first turn warmed up
            score = self._nbytes / (now - self._since)
            self._scores[self._trying].append(score)
            self._note(f"{_words(self._trying)},{score / _MIB:.3f}")
        self._since, self._nbytes = None, 0
        self._trying = next(self._plan, None)
        if self._trying is None:
            self.chosen = max(CHOICES, key=lambda choice: statistics.median(self._scores[choice]))
            self._note(f"{_words(self.chosen)},chosen")
            return self.chosen
        return self._trying

    def _note(self, line: str, mode: str = "a") -> None:
        if self._log is None:
            return
        try:
            with self._log.open(mode) as file:
                file.write(f"{line}\n")
        except OSError as error:
            if mode == "a":
                return  # the disk is full, say; training goes on
            raise UserError(f"the autotune log {self._log} cannot be written: {error}.") from error


def _words(tuned: Tuned) -> str:
    return f"{tuned.fusion_bytes // _MIB},{tuned.begin_bytes // _MIB}"

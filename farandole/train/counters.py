"""How far a run has come: what its checkpoints carry on, whatever else changes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from farandole.data import BatchInfo


@dataclass
class TrainingProgress:
    """Counts of all ranks together; every rank counts alike."""

    samples: int = 0  # trained on so far
    steps: int = 0
    epoch: int = 0
    total_epochs: int | None = None  # None: the script has not said
    epoch_under_way: bool = False
    pass_ended: bool = False  # a pass over training data, in this epoch
    resumed: bool = False
    loader_states: list[dict[str, Any]] = field(default_factory=list)
    """Of a checkpoint, for loaders that the script has yet to ask for, in that order."""
    began: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """Since the run began; a resumed run goes on where the saved one stopped."""
        return time.perf_counter() - self.began

    def go_on_from(self, seconds: float) -> None:
        self.began -= seconds - self.seconds

    def count(self, info: BatchInfo) -> None:
        self.samples += info.samples
        self.steps += 1

    def share_done(self, info: BatchInfo) -> float | None:
        """How much of the run is done before this batch, if its length is known."""
        if not self.total_epochs or not info.steps or not self.epoch_under_way:
            return None
        return (self.epoch + info.step / info.steps) / self.total_epochs

    def begin_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.epoch_under_way, self.pass_ended = True, False

    def end_epoch(self) -> None:
        self.epoch += 1
        self.epoch_under_way = False

    def next_epoch(self, *, loaders: int, under_way: bool) -> int:
        """The epoch that a checkpoint goes on with: this one, unless its pass has ended.

        `under_way`: a loader is in the middle of its pass. A script that reads its data by other
        means, with no `loaders`, is taken to save at the end of an epoch.
        """
        if under_way:
            return self.epoch
        over = self.epoch_under_way and (self.pass_ended or not loaders)
        return self.epoch + over

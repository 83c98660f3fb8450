"""What a run knows of the state that its ranks leave when one of them is lost: see `leaving`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from farandole.train.checkpoint.saver import PartSaver


class Survivors(Protocol):
    """One rank's."""

    attempt: int
    """Which start of the job this is, from 0."""

    def protect(self, saver: PartSaver) -> None:
        """From now on, what `saver` writes is left when a rank is lost."""

    def between_steps(self) -> None:
        """All steps so far are over, and the next batch has not been drawn."""

    def step(self) -> AbstractContextManager[None]:
        """Around a step."""

    def left_on_loss(self) -> AbstractContextManager[None]:
        """Around what needs the other ranks, in a step or between two."""

    def meet(self) -> None:
        """*Together.* The gradients are ready. On return the weights are to be changed."""

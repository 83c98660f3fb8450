"""A loop over data that another framework runs: it says to the run what `run.loader` would."""

from __future__ import annotations

from collections.abc import Callable

from farandole.data import BatchInfo
from farandole.train.passes import Passes
from farandole.train.session import Session


class OtherLoop:
    """For front-ends. All ranks call every method together, with the same numbers."""

    def __init__(self, session: Session, passes: Passes) -> None:
        self._session = session
        self._passes = passes

    @property
    def batch_weight(self) -> float:
        """What this rank's batch counts in an average over ranks: its size over the mean size."""
        return self._session.batch_weight

    def average_here(self) -> None:
        """The front-end averages gradients itself: there need be no model that is distributed."""
        self._session.averages_elsewhere = True

    def before_meetings(self, wait: Callable[[], None]) -> None:
        """`wait` is called before the run's own collectives: a framework that computes in the
        background may have others under way, which come first on all ranks."""
        self._passes.waits.append(wait)

    def begin_epoch(self, epoch: int, epochs: int) -> None:
        """Epoch `epoch`, from 0, of `epochs`; a pass over the training data begins."""
        self._session.reads_elsewhere = True
        progress = self._session.progress
        progress.total_epochs = epochs
        progress.begin_epoch(epoch)
        self._passes.settle()
        self._session.models.begin_pass()

    def batch(self, samples: int, step: int, steps: int | None) -> None:
        """Before step `step` of `steps` in this epoch, with so many samples on each rank."""
        whole = samples * self._session.size
        self._passes.train_batch(BatchInfo(step, steps, whole, 1.0, 1, float(samples)))

    def end_epoch(self) -> None:
        self._passes.end_training_pass()
        self._session.progress.end_epoch()

"""What keeps the state of an elastic training up to date in `model.fit`."""

from __future__ import annotations

from typing import Any

from farandole.errors import UserError
from farandole.horovod.keras.framework import keras


class CommitStateCallback(keras.callbacks.Callback):
    """Commits `state` after every `batches_per_commit` batches, and at the end of each epoch.

    Put it last, so that it commits what the other callbacks have written to the state.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        if batches_per_commit < 1:
            raise UserError(f"batches_per_commit={batches_per_commit} must be 1 or more.")
        self._state = state
        self._every = batches_per_commit
        self._left = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        self._left = self._every

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._left -= 1
        if self._left == 0:
            self._commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._commit()

    def _commit(self) -> None:
        self._left = self._every
        self._state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Keeps `state.batch`, the number of the batch of this epoch that was last done; 0 between
    epochs.

    Keras 3 asks nobody how long an epoch is, so the first epoch after a reset is not made shorter:
    give `fit` a dataset without the batches that are done, as `dataset.skip(state.batch)`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state = state

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Keeps `state.epoch`, the number of epochs that are done: those of before a reset count."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state = state
        self._before = state.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        self._before = self._state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._state.epoch = self._before + epoch + 1

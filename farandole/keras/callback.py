"""The callback that `fit` gets: it tells the strategy of every step and epoch.

It comes first, so that later callbacks see averaged metrics and weights that all ranks agree on. At
the end of each epoch it logs the metrics, so that a script can be raced.
"""

from __future__ import annotations

from typing import Any

import keras

from farandole.keras.training import KerasTraining


class InStep(keras.callbacks.Callback):
    """`rows`: of a batch on each rank, where `fit` was told; else it is counted."""

    def __init__(self, training: KerasTraining, rows: int | None) -> None:
        super().__init__()
        self._training = training
        self._rows = rows
        self._in_epoch = False
        self._uncounted = 0  # batches that began before their size was known

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        told = self.params
        self._in_epoch = True
        self._training.begin_epoch(epoch, told["epochs"], told["steps"])

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        rows = 0
        if self._rows is None:
            self._uncounted += 1
        else:
            rows, self._uncounted = self._rows * (1 + self._uncounted), 0
        self._training.begin_step(rows, batch, self.params["steps"])

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._training.end_step(logs or {})
        if self._rows is None:
            self._rows = self._counted()

    def on_test_begin(self, logs: Any = None) -> None:
        """`fit` evaluates after the last batch of an epoch, and before it says that it ends."""
        self._end_epoch()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._end_epoch()
        if logs:
            logs.update(self._training.mean_of(dict(logs)))
            self._training.run.log(epoch=epoch, **logs)

    def _end_epoch(self) -> None:
        if self._in_epoch:
            self._in_epoch = False
            self._training.end_epoch()

    def _counted(self) -> int:
        """Rows of the first batch: Keras weighs the loss by them."""
        if keras.backend.backend() == "jax":
            self.model.jax_state_sync()
        (tracker,) = (metric for metric in self.model.metrics if metric.name == "loss")
        return round(float(tracker.count))

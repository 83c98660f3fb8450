"""What Horovod adds to `model.fit`: equal weights at the start, and averaged metrics."""

from __future__ import annotations

from typing import Any

import numpy as np

from farandole.errors import UserError
from farandole.horovod.common.process_sets import ProcessSet, global_process_set
from farandole.horovod.keras.elastic_callbacks import (
    CommitStateCallback,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
)
from farandole.horovod.keras.framework import keras
from farandole.horovod.keras.learning_rate import (
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
)
from farandole.horovod.tensorflow.functions import broadcast_variables
from farandole.horovod.tensorflow.optimizer import is_distributed
from farandole.horovod.torch.functions import from_all

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "CommitStateCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
]


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Gives all ranks the weights and the optimizer's state of `root_rank` when training begins.

    Where a rank's model has no weights yet, it is done after the first batch, when all have.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        """`local_variables` are left as they are on each rank. `device` is Horovod's."""
        super().__init__()
        del device
        self.root_rank = root_rank
        self.broadcast_done = False
        self._local = {id(variable) for variable in local_variables or ()}

    def register_local_var(self, variable: Any) -> None:
        """Leaves this variable as it is on each rank."""
        self._local.add(id(variable))

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        # Keras has not made its training function yet. It would be compiled by XLA, which cannot
        # call the Python of a collective.
        if is_distributed(getattr(model, "optimizer", None)) and model.jit_compile:
            model.jit_compile = False

    def on_train_begin(self, logs: Any = None) -> None:
        if not self.broadcast_done and all(
            from_all(bool(self.model.built), "keras.built", global_process_set)
        ):
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self.broadcast_done:
            self._broadcast()

    def _broadcast(self) -> None:
        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        found = [*self.model.variables, *(optimizer.variables if optimizer is not None else ())]
        broadcast_variables([v for v in found if id(v) not in self._local], self.root_rank)
        self.broadcast_done = True


class MetricAverageCallback(keras.callbacks.Callback):
    """Averages the metrics of an epoch over all ranks, for the callbacks that come after it."""

    def __init__(self, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        del device
        self._process_set = process_set

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is None:
            return
        mine = {
            name: float(value)
            for name, value in logs.items()
            if np.ndim(value) == 0 and np.issubdtype(np.asarray(value).dtype, np.number)
        }
        everybody = from_all(mine, "keras.metrics", self._process_set)
        for rank, theirs in enumerate(everybody):
            if theirs.keys() != mine.keys():
                raise UserError(
                    f"the ranks have different metrics after epoch {epoch}: here "
                    f"{sorted(mine)}, on rank {rank} {sorted(theirs)}. Give all ranks the same "
                    "metrics and validation data, or leave MetricAverageCallback out."
                )
        for name in mine:
            logs[name] = sum(theirs[name] for theirs in everybody) / len(everybody)


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """`keras.callbacks.ModelCheckpoint` that keeps the best model only.

    `filepath` is the only argument that Horovod's does not have: there, Spark's estimator sets it.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        *,
        filepath: Any = None,
    ) -> None:
        if filepath is None:
            raise UserError("BestModelCheckpoint wants a file: filepath='best.keras'.")
        super().__init__(
            filepath,
            monitor=monitor,
            verbose=verbose,
            mode=mode,
            save_freq=save_freq,
            save_best_only=True,
        )

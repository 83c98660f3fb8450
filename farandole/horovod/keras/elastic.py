"""`hvd.elastic` for Keras: the state of a model with its optimizer, and its callbacks.

state = hvd.elastic.KerasState(model, batch=0, epoch=0)
callbacks = [hvd.elastic.UpdateBatchStateCallback(state), …, hvd.elastic.CommitStateCallback(state)]
"""

from __future__ import annotations

from farandole.horovod.keras.elastic_callbacks import (
    CommitStateCallback,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
)
from farandole.horovod.tensorflow.elastic import TensorFlowKerasState, run

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class KerasState(TensorFlowKerasState):
    """`KerasState(model, optimizer=None, batch=0, epoch=0, …)`."""

"""Horovod's callbacks and elastic states for Keras, and what else `horovod.keras` has."""

from __future__ import annotations

import re
import sys
import warnings
from typing import Any

import horovod.keras as hvd
import horovod.tensorflow.keras as tfhvd
import keras
import numpy as np
import pytest
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError
from horovod.tensorflow.elastic import TensorFlowState
from horovod.tensorflow.elastic import run as elastic_run

hvd.init()
R, N = hvd.rank(), hvd.size()
X, Y = np.ones((8, 2), "float32") * (R + 1), np.ones((8, 1), "float32")


def compiled(optimizer: Any, **options: Any) -> Any:
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile(optimizer=hvd.DistributedOptimizer(optimizer), loss="mse", **options)
    return model


class Rates(keras.callbacks.Callback):
    """Writes down the learning rate of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.seen.append(float(self.model.optimizer.learning_rate))


def fit(model: Any, *callbacks: Any, epochs: int = 3) -> Any:
    first = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    return model.fit(
        X, Y, batch_size=4, epochs=epochs, verbose=0, callbacks=[first, *callbacks], shuffle=False
    )


def values_and_names() -> None:
    assert tfhvd.DistributedOptimizer is hvd.DistributedOptimizer
    assert set(hvd.__all__) == set(tfhvd.__all__)
    np.testing.assert_allclose(hvd.allreduce(float(R)), (N - 1) / 2)
    np.testing.assert_allclose(hvd.allgather([R]), range(N))
    np.testing.assert_allclose(hvd.broadcast([float(R)], N - 1), [N - 1])
    np.testing.assert_allclose(hvd.reducescatter(np.ones(N), op=hvd.Sum), [N])
    with pytest.raises(ValueError, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)
    with pytest.raises(ValueError, match="wants a Keras optimizer"):
        hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1))
    with pytest.raises(ValueError, match="1 or more"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=0)
    with pytest.raises(ValueError, match="filepath="):
        hvd.callbacks.BestModelCheckpoint("val_accuracy")
    best = hvd.callbacks.BestModelCheckpoint("val_accuracy", filepath="best.keras")
    assert (best.monitor, best.save_best_only) == ("val_accuracy", True)


def local_layers() -> None:
    """Positional arguments mean what they mean to Horovod: the tenth is the process set."""
    layer = keras.layers.Dense(1)
    layer.build([None, 2])
    start = [keras.optimizers.SGD(), None, "", "", hvd.Compression.none, False, 1.0, hvd.Average]
    optimizer = hvd.PartialDistributedOptimizer(*start, None, hvd.global_process_set, [layer])
    variables = layer.trainable_variables
    before = [v.numpy() for v in variables]
    optimizer.apply([tf.fill(v.shape, float(N * (R + 1))) for v in variables], variables)
    for v, old in zip(variables, before, strict=True):
        np.testing.assert_allclose(old - v.numpy(), 0.01 * (R + 1), rtol=1e-4)


def warmup_and_schedule() -> None:
    rates = Rates()
    model = compiled(keras.optimizers.SGD(0.4))
    fit(model, hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2), rates)
    rising = [0.4 / N * (1 + step / 4 * (N - 1)) for step in (1, 2, 3, 4)]
    np.testing.assert_allclose(rates.seen, [*rising, 0.4, 0.4], rtol=1e-5)
    stairs = Rates()
    down = hvd.callbacks.LearningRateScheduleCallback(0.4, lambda epoch: 0.1**epoch, start_epoch=1)
    history = fit(compiled(keras.optimizers.SGD(0.4)), down, stairs)
    np.testing.assert_allclose(stairs.seen, [0.4, 0.4, 0.04, 0.04, 0.004, 0.004], rtol=1e-5)
    np.testing.assert_allclose(history.history["lr"], [0.4, 0.04, 0.004], rtol=1e-5)
    ends = Rates()
    half = hvd.callbacks.LearningRateScheduleCallback(0.4, 0.5, end_epoch=1)
    fit(compiled(keras.optimizers.SGD(0.4)), half, ends)
    np.testing.assert_allclose(ends.seen, [0.2] * 6, rtol=1e-5)
    with pytest.warns(UserWarning, match=re.escape("lambda epoch: 0.5 ** (epoch - 2)")):
        hvd.callbacks.LearningRateScheduleCallback(0.4, 0.5, start_epoch=2)
    with pytest.warns(UserWarning, match="momentum"):
        fit(compiled(keras.optimizers.SGD(0.4, momentum=0.9)), half, epochs=1)
    eager = compiled(keras.optimizers.SGD(0.4, momentum=0.9), run_eagerly=True)
    fit(eager, half, epochs=1)
    assert eager.optimizer.momentum == 0.9, "it is only corrected for a batch"
    with pytest.raises(ValueError, match="above 0"):
        hvd.callbacks.LearningRateWarmupCallback(0.0)


def metrics() -> None:
    seen: list[Any] = []

    class Reader(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append((dict(logs), self.model.get_weights()))

    class Own(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["mine"] = float(R)
            if R == 1:
                logs["only here"] = 1.0

    average = hvd.callbacks.MetricAverageCallback()
    logs = {"loss": float(R), "note": "text"}
    average.on_epoch_end(0, logs)
    assert logs == {"loss": (N - 1) / 2, "note": "text"}
    if N > 1:
        with pytest.raises(ValueError, match="only here"):
            fit(compiled(keras.optimizers.SGD()), Own(), average, Reader(), epochs=1)


def xla_is_turned_off_or_refused() -> None:
    model = compiled(keras.optimizers.SGD(0.1), jit_compile=True)
    with pytest.raises(Exception, match="cannot be compiled by XLA"):
        model.fit(X, Y, verbose=0)
    fit(compiled(keras.optimizers.SGD(0.1), jit_compile=True))


def elastic_states() -> None:
    model = compiled(keras.optimizers.Adam(0.1))
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    state.sync()
    before = [v.numpy() for v in (*model.variables, *model.optimizer.variables)]
    commits: list[int] = []
    state.commit = lambda: commits.append(state.batch)
    update = hvd.elastic.UpdateBatchStateCallback(state)
    done = hvd.elastic.UpdateEpochStateCallback(state)
    commit = hvd.elastic.CommitStateCallback(state, batches_per_commit=2)
    fit(model, update, done, commit, epochs=2)
    assert (state.epoch, state.batch, commits) == (2, 0, [1, 0, 1, 0])
    assert any((v.numpy() != b).any() for v, b in zip(model.variables, before, strict=False))
    state.restore()
    assert state.epoch == 0
    for v, b in zip((*model.variables, *model.optimizer.variables), before, strict=True):
        assert (v.numpy() == b).all()
    weights = tf.Variable([float(R)])
    plain = TensorFlowState([weights], step=R)
    plain.sync()
    assert (weights.numpy().tolist(), plain.step) == ([0.0], 0)
    with pytest.raises(ValueError, match="no variables yet"):
        hvd.elastic.KerasState(keras.Sequential([keras.layers.Dense(1)]))

    @elastic_run
    def train(state: Any) -> None:
        weights.assign_add([1.0])

        @tf.function
        def collective() -> Any:
            return tfhvd.allreduce(weights, name="elastic")

        tfhvd.shutdown()
        collective()

    # Nobody replaces workers here, so what went wrong comes out, by its own name, after a restore.
    with pytest.raises((HorovodInternalError, ValueError), match=re.escape("hvd.init()")):
        train(plain)


def main() -> None:
    warnings.simplefilter("ignore")
    values_and_names()
    local_layers()
    warmup_and_schedule()
    metrics()
    xla_is_turned_off_or_refused()
    elastic_states()
    print("all right", flush=True)
    sys.exit(0)


main()

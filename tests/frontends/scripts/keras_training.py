"""Trains in several ways under Horovod's interface for Keras, and writes the weights of each.

Alone it trains on the whole batches; with N ranks each has every Nth sample of them.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as khvd
import keras
import numpy as np
import tensorflow as tf

keras.config.set_floatx("float64")
hvd.init()
R, N = hvd.rank(), hvd.size()
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(96, 6)), RNG.integers(0, 3, size=96)
BATCH, EPOCHS = 24, 2


def mine(values: Any) -> Any:
    """This rank's samples, in batches of its own: the Nth part of each global batch."""
    cut = values.reshape(-1, BATCH, *values.shape[1:])[:, R::N]
    return cut.reshape(-1, *values.shape[1:])


def network(seed: int, norm: Any = None) -> Any:
    keras.utils.set_random_seed(seed)
    layers = [keras.Input([6]), keras.layers.Dense(8, activation="tanh")]
    layers += [norm] if norm is not None else []
    return keras.Sequential([*layers, keras.layers.Dense(3)])


def fitted(optimizer: Any, norm: Any = None, **options: Any) -> Any:
    model = network(seed=R, norm=norm)  # each rank's own: rank 0's must win
    model.compile(
        optimizer=khvd.DistributedOptimizer(optimizer, **options),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = model.fit(
        mine(X),
        mine(Y),
        batch_size=BATCH // N,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[
            khvd.callbacks.BroadcastGlobalVariablesCallback(0),
            khvd.callbacks.MetricAverageCallback(),
        ],
    )
    return model, history


def by_tape(graph: bool) -> Any:
    model = network(seed=R)
    hvd.broadcast_variables(model.variables, root_rank=0)
    optimizer = keras.optimizers.Adam(0.01)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    run = tf.function(step) if graph else step
    xs, ys = mine(X), mine(Y)
    for start in range(0, len(xs), BATCH // N):
        run(xs[start : start + BATCH // N], ys[start : start + BATCH // N])
    return model


def main() -> None:
    target = sys.argv[1]
    found: dict[str, Any] = {}
    model, history = fitted(keras.optimizers.Adam(0.01))
    found["adam"] = model
    found["momentum"], _ = fitted(keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=1.0))
    # Two batches make a step: the sum of their gradients, or their average.
    found["passes"], _ = fitted(keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    norm = hvd.SyncBatchNormalization()
    found["norm"], _ = fitted(keras.optimizers.SGD(0.1), norm)
    found["tape"], found["graph"] = by_tape(graph=False), by_tape(graph=True)
    arrays = {
        f"{name}.{index}": value
        for name, trained in found.items()
        for index, value in enumerate(trained.get_weights())
    }
    arrays["history"] = np.array(history.history["loss"] + history.history["accuracy"])
    digests = hvd.allgather_object([float(np.abs(value).sum()) for value in arrays.values()])
    assert all(one == digests[0] for one in digests), "all ranks have the same weights"
    if R == 0:
        np.savez(target, **arrays)
        model.save(os.path.join(os.path.dirname(target), "model.keras"))  # noqa: PTH118, PTH120
    hvd.barrier()
    loaded = khvd.load_model(os.path.join(os.path.dirname(target), "model.keras"))  # noqa: PTH118, PTH120
    for ours, theirs in zip(loaded.get_weights(), model.get_weights(), strict=True):
        assert (ours == theirs).all()
    assert int(loaded.optimizer.iterations) == int(model.optimizer.iterations)
    loaded.fit(mine(X), mine(Y), batch_size=BATCH // N, epochs=1, shuffle=False, verbose=0)
    sums = hvd.allgather_object(float(np.abs(loaded.get_weights()[0]).sum()))
    assert len(set(sums)) == 1, "the loaded optimizer is distributed"
    print("trained", flush=True)


main()

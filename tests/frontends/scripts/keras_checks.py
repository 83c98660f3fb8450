"""What fd.keras does between ranks, with the backend of KERAS_BACKEND: one job, many checks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import farandole as fd

keras.config.set_floatx("float64")
if keras.backend.backend() == "jax":
    import jax

    jax.config.update("jax_enable_x64", True)
run = fd.keras.init(timeout=300)  # a slow machine may take long to compile a model
rank, size = run.rank, run.size
ROWS = 8  # of a batch on each rank
draw = np.random.default_rng(0)
x = draw.normal(size=(6 * ROWS * size, 5))
y = np.tanh(x @ draw.normal(size=(5, 2)))


def refused(what: Callable[[], Any], kind: type[Exception], *words: str) -> None:
    with pytest.raises(kind) as caught:
        what()
    assert all(word in str(caught.value) for word in words), caught.value


def build(optimizer: Any = None, *, norm: bool = False, seed: int = 1) -> Any:
    keras.utils.set_random_seed(seed)
    # Not Dense: with torch, Keras multiplies matrices of float64 as float32.
    dense = functools.partial(keras.layers.EinsumDense, "ij,jk->ik", bias_axes="k")
    layers = [dense(output_shape=8, activation="tanh"), dense(output_shape=2)]
    if norm:
        layers.insert(1, keras.layers.BatchNormalization())
    model = keras.Sequential([keras.Input((5,)), *layers], name="net")
    optimizer = optimizer or keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def weights(model: Any) -> list[Any]:
    return [np.asarray(keras.ops.convert_to_numpy(v)) for v in model.weights]


def close(one: Any, other: Any, limit: float = 1e-12) -> None:
    for a, b in zip(one, other, strict=True):
        assert a.dtype == b.dtype
        assert np.max(np.abs(a - b)) <= limit, np.max(np.abs(a - b))


def everywhere(model: Any) -> list[list[Any]]:
    """The weights of all ranks."""
    return [
        [np.array(w) for w in of]
        for of in run.group.gather_json([w.tolist() for w in weights(model)])
    ]


def fit(model: Any, epochs: int = 2, **options: Any) -> Any:
    own = fd.keras.shard(x, y)
    return model.fit(*own, batch_size=ROWS, epochs=epochs, shuffle=False, verbose=0, **options)


def serial(optimizer: Any = None, epochs: int = 2) -> Any:
    model = build(optimizer)
    model.fit(x, y, batch_size=ROWS * size, epochs=epochs, shuffle=False, verbose=0)
    return model


def check_parity() -> None:
    """As one worker with the global batch; metrics too. Rank 0's weights are the start."""
    for kind in (keras.optimizers.Adam, functools.partial(keras.optimizers.SGD, momentum=0.9)):
        model = build(kind(0.05), seed=1 + rank)
        assert fd.keras.distribute(model) is model
        history = fit(model)
        alone = serial(kind(0.05))
        close(weights(model), weights(alone))
        expected = alone.evaluate(x, y, batch_size=ROWS * size, verbose=0, return_dict=True)
        own = fd.keras.shard(x, y)
        found = model.evaluate(*own, batch_size=ROWS, verbose=0, return_dict=True)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert abs(found[name] - value) < 1e-6, (found, expected)
        assert abs(history.history["loss"][1] - alone.history.history["loss"][1]) < 1e-6
    assert run.samples == 2 * 2 * len(x), run.samples


def check_local() -> None:
    """Local steps and the mean of the models, as computed by hand."""
    model = fd.keras.distribute(build(seed=1 + rank), sync="local:every=4,meet_epochs=false")
    fit(model)
    by_hand = build()
    own_x, own_y = fd.keras.shard(x, y)
    step = 0
    for _ in range(2):
        for i in range(0, len(own_x), ROWS):
            by_hand.train_on_batch(own_x[i : i + ROWS], own_y[i : i + ROWS])
            step += 1
            if step % 4 == 0:
                everyone = everywhere(by_hand)
                by_hand.set_weights([np.mean(of, axis=0) for of in zip(*everyone, strict=True)])
    close(weights(model), weights(by_hand))


def check_strategies() -> None:
    """After an epoch all ranks hold the same model, with statistics and momentum."""
    texts = ["local:every=5,moments=average", "daso"]
    if keras.backend.backend() == "torch":  # the others take long to compile each model
        texts += ["allreduce:codec=int8", "lagged:steps=2", "postlocal:every=2,at=0.4"]
        texts += ["adacomm:start=4,steps=4", "diloco:every=3,momentum=0", "federated:every=2"]
    for text in texts:
        model = fd.keras.distribute(build(norm=True, seed=1 + rank), sync=text)
        before = model.evaluate(x, y, verbose=0)[0]
        history = fit(model, 3, validation_data=(x, y))
        first, *others = everywhere(model)
        for other in others:
            close(other, first, 0.0 if text != "lagged:steps=2" else 1e-12)
        assert history.history["val_loss"][-1] < before, (text, before, history.history)


def check_sources() -> None:
    class Batches(keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return int(2 * size + (size > 1))

        def __getitem__(self, index: int) -> Any:
            return np.full((2, 5), index, float), np.zeros((2, 2))

    own = fd.keras.shard(Batches(workers=1))
    assert len(own) == 2
    assert [int(own[i][0][0, 0]) for i in range(2)] == [rank, size + rank]
    model = fd.keras.distribute(build())
    counted = run.samples
    model.fit(own, epochs=1, verbose=0)
    assert run.samples == counted + 2 * 2 * size
    part = fd.keras.shard({"a": np.arange(2 * size + 1)[:, None], "b": None})
    assert part["a"][:, 0].tolist() == [rank, size + rank]
    assert part["b"] is None
    refused(lambda: fd.keras.shard(x, y[1:]), fd.UserError, "rows")
    refused(lambda: fd.keras.shard(iter([x])), fd.UserError, "iterator")
    if size > 1:
        refused(lambda: fd.keras.shard(x[:1]), fd.UserError, "1 rows", "2 ranks")
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        rows = tf.data.Dataset.range(2 * size + 1)
        found = [int(element) for element in fd.keras.shard(rows)]
        assert found == ([0, 1, 2] if size == 1 else [rank, size + rank])
        endless = rows.filter(lambda n: n > 0)
        refused(lambda: fd.keras.shard(endless), fd.UserError, "cardinality")


def check_refusals() -> None:
    refused(lambda: fd.keras.distribute(3), fd.UserError, "int")
    plain = keras.Sequential([keras.layers.Dense(2)])
    refused(lambda: fd.keras.distribute(plain), fd.UserError, "compile")
    plain.compile("sgd", "mse")
    refused(lambda: fd.keras.distribute(plain), fd.UserError, "build")
    scaled = build(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))
    refused(lambda: fd.keras.distribute(scaled), fd.UserError, "mixed_bfloat16")
    for text, word in {"hogwild": "memory", "server": "servers", "daso:x=1": "x"}.items():
        refused(functools.partial(fd.keras.distribute, build(), text), fd.UserError, word)
    model = fd.keras.distribute(build())
    refused(lambda: fd.keras.distribute(model), fd.UserError, "already")
    refused(lambda: model.train_on_batch(x, y), fd.UserError, "fit")
    model.compile("sgd", "mse")
    refused(lambda: fit(model), fd.UserError, "compiled again")
    if size > 1:
        uneven = fd.keras.distribute(build())
        rows = ROWS * (1 + rank)
        refused(
            lambda: uneven.fit(x[:rows], y[:rows], batch_size=ROWS, verbose=0),
            fd.UserError,
            "[1, 2] steps",
        )
        other = keras.Sequential([keras.Input((3 + rank,)), keras.layers.Dense(1)], name="o")
        other.compile("sgd", "mse")
        error = fd.ModelMismatchError
        refused(lambda: fd.keras.distribute(other), error, "kernel", "(3, 1)", "(4, 1)")


def check_checkpoints() -> None:
    """Weights, statistics, momentum and counters: a run goes on as if never stopped."""
    model = fd.keras.distribute(build(norm=True))
    fit(model, 1)
    saved = run.save()
    kept = weights(model)
    fit(model, 1)
    further = weights(model)
    steps = int(model.optimizer.iterations)
    run.load(saved)
    close(weights(model), kept, 0.0)
    assert int(model.optimizer.iterations) == steps // 2
    fit(model, 1)
    close(weights(model), further)


checks = [
    check_parity,
    check_local,
    check_strategies,
    check_sources,
    check_refusals,
    check_checkpoints,
]
for check in checks:
    check()
    if rank == 0:
        print(f"{check.__name__} passed", flush=True)
run.print(f"{len(checks)} checks passed on {size} with {keras.backend.backend()}")

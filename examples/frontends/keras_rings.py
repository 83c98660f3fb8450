"""Three rings of points, told apart by a Keras model, under any strategy and with any backend.

    KERAS_BACKEND=jax farandole run -n 2 examples/frontends/keras_rings.py
    farandole race -n 2 --sync allreduce --sync local:every=8 --target val_accuracy=0.95 \\
        examples/frontends/keras_rings.py

Needs Keras and a backend: pip install 'farandole[tensorflow]', or torch alone and keras.
"""

import argparse

import keras
import numpy as np

import farandole as fd

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--batch", type=int, default=64, help="over all workers together")
args = parser.parse_args()

run = fd.keras.init()

draw = np.random.default_rng(0)
labels = draw.integers(0, 3, 3000)
angles, radii = draw.uniform(0, 2 * np.pi, 3000), 1 + labels + draw.normal(0, 0.15, 3000)
points = np.stack([radii * np.cos(angles), radii * np.sin(angles)], 1).astype(np.float32)

model = keras.Sequential(
    [
        keras.Input((2,)),
        keras.layers.Dense(32, activation="relu"),
        keras.layers.Dense(32, activation="relu"),
        keras.layers.Dense(3),
    ]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])

fd.keras.distribute(model)  # --sync, or all-reduce
run.load()  # a run of the same --name goes on
model.fit(
    *fd.keras.shard(points[600:], labels[600:]),
    batch_size=args.batch // run.size,
    validation_data=fd.keras.shard(points[:600], labels[:600]),
    initial_epoch=run.epoch,
    epochs=args.epochs,
    callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: run.save())],
    verbose=0,
)

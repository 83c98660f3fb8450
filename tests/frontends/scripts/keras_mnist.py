"""A script as Horovod's users have it: Keras, a convolutional network, small pictures of digits.

Nothing in it is Farandole's. The pictures are drawn here: digits of seven segments, with noise.
"""

import horovod.keras as hvd
import keras
import numpy as np

hvd.init()

SEGMENTS = ["abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abfgcd"]
PLACES = {
    "a": (slice(1, 2), slice(2, 8)),
    "b": (slice(1, 6), slice(7, 8)),
    "c": (slice(6, 11), slice(7, 8)),
    "d": (slice(10, 11), slice(2, 8)),
    "e": (slice(6, 11), slice(2, 3)),
    "f": (slice(1, 6), slice(2, 3)),
    "g": (slice(5, 6), slice(2, 8)),
}


def pictures(number, seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, number)
    images = np.zeros((number, 12, 10, 1), "float32")
    for image, label in zip(images, labels, strict=True):
        for segment in SEGMENTS[label]:
            image[PLACES[segment]] = 1.0
    return images + 0.3 * rng.normal(size=images.shape).astype("float32"), labels


keras.utils.set_random_seed(hvd.rank())
x_train, y_train = pictures(2048, seed=1)
x_test, y_test = pictures(512, seed=2)
x_train, y_train = x_train[hvd.rank() :: hvd.size()], y_train[hvd.rank() :: hvd.size()]

model = keras.Sequential(
    [
        keras.Input((12, 10, 1)),
        keras.layers.Conv2D(8, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(32, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.003 * hvd.size()))
model.compile(
    loss="sparse_categorical_crossentropy",
    optimizer=optimizer,
    metrics=["accuracy"],
    experimental_run_tf_function=False,  # as Horovod's documentation has it
)
model.fit(
    x_train,
    y_train,
    batch_size=32,
    epochs=6,
    verbose=0,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.003 * hvd.size(), warmup_epochs=2),
    ],
)
loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
if hvd.rank() == 0:
    print(f"accuracy {accuracy:.4f}")

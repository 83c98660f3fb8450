"""Models that were saved in a distributed training, ready to go on with it."""

from __future__ import annotations

from typing import Any

from farandole.horovod.keras.framework import keras
from farandole.horovod.tensorflow.compression import Compression, Compressor
from farandole.horovod.tensorflow.optimizer import DistributedOptimizer


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: dict[str, Any] | None = None,
    compression: type[Compressor] = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """The model of a file, whose optimizer applies the gradients of all ranks, and has its state.

    `custom_optimizers` are classes that Keras does not know, as are `custom_objects` by name.
    """
    del legacy_opts
    known = {kind.__name__: kind for kind in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects=known | (custom_objects or {}))
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
        model.jit_compile = False  # XLA cannot call the Python of a collective
    return model

"""Keras itself, imported in one place, and what Farandole asks of it."""

from __future__ import annotations

try:
    import keras
except ModuleNotFoundError as error:
    if error.name != "keras":
        raise
    raise ModuleNotFoundError(
        "horovod.keras needs Keras 3: pip install 'farandole[tensorflow]'", name="keras"
    ) from error

__all__ = ["keras"]

if int(keras.__version__.split(".")[0]) < 3:
    raise ImportError(
        f"Keras {keras.__version__} is too old for horovod.keras, which needs Keras 3 on "
        "TensorFlow: pip install 'farandole[tensorflow]'"
    )
if keras.backend.backend() != "tensorflow":
    raise ImportError(
        f"Keras runs on {keras.backend.backend()} here, and horovod.keras is for Keras on "
        "TensorFlow. Set KERAS_BACKEND=tensorflow before the first import of keras."
    )

"""Keras itself, imported in one place, and what Farandole asks of it."""

from __future__ import annotations

import functools
from typing import Any

try:
    import keras
except ModuleNotFoundError as error:
    if error.name != "keras":
        raise
    raise ModuleNotFoundError(
        "horovod.keras needs Keras 3: pip install 'farandole[tensorflow]'", name="keras"
    ) from error

__all__ = ["accept_flag_of_horovod", "keras"]

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


def accept_flag_of_horovod() -> None:
    """From now on `model.compile` takes `experimental_run_tf_function`, and ignores it.

    Horovod's documentation had users pass it, for the Keras of its time. Keras 3 always computes
    gradients with the optimizer that it is given, and refuses arguments that it does not know.
    """
    # Where it is defined: on a subclass it would look like a user's own, which Keras does not call
    # when it loads a model.
    owner = next(kind for kind in keras.Model.__mro__ if "compile" in vars(kind))
    original = owner.compile
    if getattr(original, "takes_flag_of_horovod", False):
        return

    @functools.wraps(original)
    def compile_model(
        self: Any, *args: Any, experimental_run_tf_function: Any = None, **kwargs: Any
    ) -> Any:
        del experimental_run_tf_function
        return original(self, *args, **kwargs)

    compile_model.takes_flag_of_horovod = True  # type: ignore[attr-defined]
    owner.compile = compile_model

"""`fd.keras`: Keras 3 models on many workers, with any backend: torch, TensorFlow or JAX.

    run = fd.keras.init()
    model.compile(optimizer, loss)
    fd.keras.distribute(model)                 # --sync, or sync=…, or all-reduce
    model.fit(*fd.keras.shard(x, y), epochs=10)

docs/keras.md says more. Collectives carry bytes with torch, so torch is imported too.
"""

from __future__ import annotations

from farandole.errors import UserError

try:
    from farandole.keras.distribute import distribute
    from farandole.keras.sharding import shard
    from farandole.keras.start import init
except ModuleNotFoundError as error:
    if error.name not in ("keras", "tensorflow", "jax"):
        raise
    raise UserError(
        f"fd.keras needs {error.name}, which is not installed: pip install 'farandole[tensorflow]'"
        ", or 'farandole[jax]' and keras, and name the backend in KERAS_BACKEND."
    ) from error

__all__ = ["distribute", "init", "shard"]

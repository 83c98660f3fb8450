"""`fd.jax`: JAX's arrays between ranks, in and out of `jit`.

    run = fd.jax.init()
    params = fd.jax.broadcast(params)
    optimizer = optax.chain(fd.jax.average_gradients(), optax.sgd(0.1))

docs/jax.md says more. Collectives carry bytes with torch, so torch is imported too.
"""

from __future__ import annotations

from farandole.errors import UserError

try:
    from farandole.jax.averaging import Average, average
    from farandole.jax.collectives import allgather, allreduce, barrier, broadcast
    from farandole.jax.gradients import average_gradients
    from farandole.jax.loading import loader
    from farandole.jax.start import init, rank, size
except ModuleNotFoundError as error:
    if error.name not in ("jax", "jaxlib"):
        raise
    raise UserError(
        "fd.jax needs JAX, which is not installed: pip install 'farandole[jax]'."
    ) from error

__all__ = [
    "Average",
    "allgather",
    "allreduce",
    "average",
    "average_gradients",
    "barrier",
    "broadcast",
    "init",
    "loader",
    "rank",
    "size",
]

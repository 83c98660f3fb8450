"""The transformation that averages gradients, for a chain of optax."""

from __future__ import annotations

from typing import Any

from farandole.errors import UserError
from farandole.jax.collectives import reduce_tree
from farandole.sync import AllReduce
from farandole.train.current_run import current


def average_gradients() -> Any:
    """An `optax.GradientTransformation` that averages what it is given over all ranks.

    Put it first in a chain: `optax.chain(fd.jax.average_gradients(), optax.adam(1e-3))`. Where
    batches come from `fd.jax.loader` or `run.loader`, each rank counts by the size of its batch.
    Raises `UserError` under a `--sync` other than `allreduce`: `fd.jax.average` takes all of them.
    """
    try:
        import optax
    except ModuleNotFoundError as error:
        raise UserError(
            "average_gradients is a transformation of optax, which is not installed: "
            "pip install 'farandole[jax]'."
        ) from error
    run = current()
    asked = run.settings.sync
    if asked is not None and asked != AllReduce():
        raise UserError(
            f"--sync {asked}: average_gradients() is a plain all-reduce. A script that is to run "
            "under any strategy writes `average = fd.jax.average(params)`, then "
            "`average.gradients(grads)` and `average.step(params)`; see docs/jax.md."
        )
    run.other_loop.average_here()

    def init(params: Any) -> Any:
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return reduce_tree(updates, "average", weighed=True), state

    return optax.GradientTransformation(init, update)

"""`fd.jax.init`: a run whose collectives may be begun by JAX's threads."""

from __future__ import annotations

from typing import Any

import jax

from farandole.comm.framework_versions import require_same_frameworks
from farandole.train.current_run import current
from farandole.train.elastic.start import most_workers
from farandole.train.run import Run
from farandole.train.start import init as init_run


def init(**options: Any) -> Run:
    """Joins the job as `fd.init` does, with its options, and returns the run.

    Call it before anything is computed. On CPUs it has JAX carry out each computation before the
    next is begun: collectives inside of `jit` and those of the script are then begun in the same
    order on all ranks.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    run = init_run(**options)
    if most_workers() is None:  # who joins later cannot be asked now
        require_same_frameworks(run.group)
    run.other_loop.before_meetings(jax.effects_barrier)
    return run


def rank() -> int:
    return current().rank


def size() -> int:
    return current().size

"""`fd.keras.init`: a run, and Keras's own random state seeded like torch's."""

from __future__ import annotations

from typing import Any

import keras

from farandole.comm.framework_versions import require_same_frameworks
from farandole.train.elastic.start import most_workers
from farandole.train.run import Run
from farandole.train.start import init as init_run


def init(**options: Any) -> Run:
    """Joins the job as `fd.init` does, with its options, and returns the run.

    Seeds Keras too, so that all ranks build the same model. With the JAX backend it also has JAX
    carry out each computation before the next is begun, as `fd.jax.init` does.
    """
    if keras.backend.backend() == "jax":
        from farandole.keras.jax_backend import begin_in_order

        begin_in_order()
    run = init_run(**options)
    if most_workers() is None:  # who joins later cannot be asked now
        require_same_frameworks(run.group)
    if options.get("seed", 0) is not None or run.settings.seed is not None:
        keras.utils.set_random_seed(run.seed)
    return run

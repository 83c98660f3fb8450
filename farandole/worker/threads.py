"""How many threads a rank computes with."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from farandole.system.cores import fair_share, usable_cores
from farandole.worker.environment import RankAssignment


def share_cores(assignment: RankAssignment, environ: Mapping[str, str]) -> None:
    """Divides the cores between the ranks of a host where the launcher did not (mpirun, srun).

    Left alone, every rank would start as many threads as there are cores. A rank that is bound to
    some of the cores has its share already.
    """
    bound = usable_cores() < (os.cpu_count() or 1)
    if assignment.local_size > 1 and not bound and "OMP_NUM_THREADS" not in environ:
        torch.set_num_threads(fair_share(assignment.local_size))

"""Beginning and end, who is where, what there is: Horovod's questions, answered for Farandole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from farandole.errors import UserError
from farandole.horovod import session
from farandole.horovod.built import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    mpi_built,
    nccl_built,
    rocm_built,
)
from farandole.horovod.common.process_sets import ProcessSet

__all__ = [
    "add_process_set",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]

_MPI_LAUNCHERS = ("openmpi", "mpich", "mvapich")


def init(
    comm: Sequence[int] | None = None,
    process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None,
) -> None:
    """Joins all other ranks of the job, or runs alone as rank 0 of 1.

    Called again before `shutdown` it does nothing. `process_sets` are added at once; the word
    "dynamic", which Horovod wants where sets are added later, is not needed. Of ranks in `comm`
    only all are possible.
    """
    holder = session.holder()
    if holder.session is not None:
        return
    if isinstance(process_sets, str):
        if process_sets != "dynamic":
            raise UserError(f"process_sets={process_sets!r}: give process sets, or 'dynamic'.")
        process_sets = None
    holder.begin(process_sets or ())
    if comm is not None and (
        not isinstance(comm, (list, tuple, range)) or sorted(comm) != list(range(size()))
    ):
        holder.end()
        raise UserError(
            f"comm={comm}: all ranks of a job take part here. Leave comm out, and confine "
            "collectives to some of them with hvd.ProcessSet."
        )


def shutdown() -> None:
    """Leaves the others; `init` may be called again. Collectives under way fail on all ranks."""
    session.holder().end()


def is_initialized() -> bool:
    """Whether `init` has been called, and `shutdown` not since."""
    return session.holder().session is not None


def start_timeline(file_path: str | Path, mark_cycles: bool = False) -> None:
    """Records from here on; see `stop_timeline`. Ranks that do not call it are left out."""
    session.current().start_timeline(Path(file_path), mark_cycles)


def stop_timeline() -> None:
    """Writes the timeline of all ranks that record one, for https://ui.perfetto.dev."""
    session.current().stop_timeline()


def rank() -> int:
    """This process's number among all, from 0 on."""
    return session.current().rank


def size() -> int:
    """The number of processes."""
    return session.current().size


def local_rank() -> int:
    """This process's number among those of its host."""
    return session.current().local_rank


def local_size() -> int:
    """The number of processes on this host."""
    return session.current().local_size


def cross_rank() -> int:
    """This host's number among those that have a process with this local rank."""
    return session.current().cross_rank


def cross_size() -> int:
    """The number of hosts that have a process with this local rank."""
    return session.current().cross_size


def is_homogeneous() -> bool:
    """Whether every host has the same number of processes."""
    return session.current().is_homogeneous


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Makes a process set usable, and returns it. All ranks must call it, in the same order."""
    return session.current().add_set(process_set)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Ends a process set; says whether there was one. All ranks must call it."""
    return session.current().remove_set(process_set)


# How the ranks meet. What there is to do it with is in `built`.


def mpi_threads_supported() -> bool:
    """Whether MPI may be called from several threads. Farandole's ranks do not talk through it."""
    session.current()
    return False


def mpi_enabled() -> bool:
    """Whether an MPI launcher has started this job."""
    return session.current().assignment.launcher in _MPI_LAUNCHERS


def gloo_enabled() -> bool:
    """Whether the ranks find each other without MPI: always."""
    return True

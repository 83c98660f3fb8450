"""Beginning and end, and who is where: as for PyTorch, and as scalars for graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from farandole.horovod import session
from farandole.horovod.common.process_sets import ProcessSet, global_process_set
from farandole.horovod.tensorflow.bridge import ask
from farandole.horovod.tensorflow.framework import tf
from farandole.horovod.torch import basics, movements
from farandole.horovod.torch.basics import local_rank, local_size, rank, size

_FEWEST_WAITING = 16  # collectives of a graph that may wait at the same time


def init(
    comm: Sequence[int] | None = None,
    process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None,
) -> None:
    """Joins all other ranks of the job, or runs alone as rank 0 of 1.

    Call it before TensorFlow computes anything: only then can TensorFlow still be told to use
    this rank's share of the cores, and to have threads for collectives that wait for other ranks.
    """
    basics.init(comm, process_sets)
    threads = tf.config.threading
    # TensorFlow refuses when it has begun already; then it goes on as it is.
    with contextlib.suppress(RuntimeError):
        if threads.get_inter_op_parallelism_threads() == 0:
            threads.set_inter_op_parallelism_threads(_FEWEST_WAITING)
        if threads.get_intra_op_parallelism_threads() == 0 and size() > 1:
            threads.set_intra_op_parallelism_threads(torch.get_num_threads())


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """The number of processes of a process set, as an int32 scalar, each time it is computed."""
    del name
    return ask(lambda: _size_of(process_set_id), tf.int32)


def rank_op(name: str | None = None) -> Any:
    """`rank()`, as an int32 scalar."""
    del name
    return ask(rank, tf.int32)


def local_size_op(name: str | None = None) -> Any:
    """`local_size()`, as an int32 scalar."""
    del name
    return ask(local_size, tf.int32)


def local_rank_op(name: str | None = None) -> Any:
    """`local_rank()`, as an int32 scalar."""
    del name
    return ask(local_rank, tf.int32)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """1 where this process is in the process set, else 0, as an int32 scalar."""
    del name
    return ask(lambda: int(bool(_set_of(process_set_id).included())), tf.int32)


def join(device: int = -1) -> Any:
    """This rank has no more data: it takes part in the others' all-reduces with zeros.

    Returns when all ranks have joined: the rank that was last, as an int32 scalar.
    """
    return ask(lambda: movements.join(device), tf.int32)


def barrier(process_set: ProcessSet = global_process_set, name: str | None = None) -> None:
    """Returns when every rank of the set has called it; in a graph, each time that it runs."""
    del name

    def wait() -> int:
        movements.barrier(process_set)
        return 0

    ask(wait, tf.int32)


def size_of(process_set: ProcessSet) -> Any:
    """The number of ranks of a set, each time it is computed."""
    return ask(lambda: process_set.size() or 1, tf.int32)


def _size_of(process_set_id: int) -> int:
    return _set_of(process_set_id).size() or 1


def _set_of(process_set_id: int) -> ProcessSet:
    if process_set_id == 0:
        return global_process_set
    return session.current().set_numbered(process_set_id)

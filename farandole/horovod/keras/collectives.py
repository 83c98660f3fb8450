"""Collectives of values: what goes in may be a number, what comes out is an array."""

from __future__ import annotations

from typing import Any

from farandole.horovod import tensorflow as hvd
from farandole.horovod.tensorflow.compression import Compression, Compressor


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: str | None = None,
    compression: type[Compressor] = Compression.none,
) -> Any:
    """`value` combined over all ranks, as an array; the average if nothing else is said."""
    reduced = hvd.allreduce(
        value,
        average=average,
        name=name,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        compression=compression,
    )
    return _plain(reduced)


def allgather(value: Any, name: str | None = None) -> Any:
    """All ranks' values, one after the other along the first dimension, as an array."""
    return _plain(hvd.allgather(value, name))


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """The value of `root_rank` on every rank, as an array."""
    return _plain(hvd.broadcast(value, root_rank, name))


def reducescatter(value: Any, name: str | None = None, op: str = hvd.Average) -> Any:
    """This rank's share of the rows of `value` combined over all ranks, as an array."""
    return _plain(hvd.reducescatter(value, name=name, op=op))


def _plain(tensor: Any) -> Any:
    """In a graph there is no array yet."""
    return tensor.numpy() if hasattr(tensor, "numpy") else tensor

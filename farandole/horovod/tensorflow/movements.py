"""Collectives that move numbers: all-gather, broadcast and all-to-all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from farandole.horovod import session
from farandole.horovod.common.process_sets import ProcessSet, global_process_set
from farandole.horovod.tensorflow.bridge import Output, ask, collective
from farandole.horovod.tensorflow.framework import as_tensor, as_tensors, tf, unconverted
from farandole.horovod.torch.dense_reductions import Reduction, start_group, start_one
from farandole.horovod.torch.movements import (
    allgather_async,
    alltoall_async,
    broadcast_async,
    grouped_allgather_async,
)


def _of(name: str | None, part: str) -> str | None:
    return f"{name}.{part}" if name is not None else None


@unconverted
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """All ranks' tensors, one after the other along the first dimension, in which they may differ.

    Differentiable: a rank's gradient is the average, over the ranks, of that of its own rows.
    """
    del ignore_name_scope
    (result,) = gather([as_tensor(tensor, "allgather")], name, process_set, grouped=False)
    return result


@unconverted
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """`allgather` of each tensor, in one go. Differentiable."""
    del ignore_name_scope
    found = as_tensors(tensors, "grouped_allgather")
    gathered: list[Any] = gather(found, name, process_set, grouped=True)
    return gathered


@unconverted
def gather(
    tensors: Sequence[Any], name: str | None, process_set: ProcessSet, *, grouped: bool
) -> list[Any]:
    """New tensors. Differentiable."""
    rows = [tf.reshape(tensor, [1]) if tensor.shape.rank == 0 else tensor for tensor in tensors]

    @tf.custom_gradient
    def joined(*given: Any) -> Any:
        def start(found: Any) -> Any:
            if grouped:
                return grouped_allgather_async(found, name, process_set)
            return allgather_async(found[0], name, process_set)

        def back(*gradients: Any) -> list[Any]:
            how = Reduction.average(_of(name, "grad"), process_set)
            likes = [Output.like(gradient) for gradient in gradients]
            averaged = collective(
                lambda found: start_group(found, how, quiet=True), gradients, likes, how.name
            )
            return _own_rows(averaged, given, _of(name, "rows"), process_set)

        results = collective(start, given, [Output.rows_like(one) for one in given], name)
        return (results if len(results) > 1 else results[0]), back

    found = joined(*rows)
    return list(found) if len(rows) > 1 else [found]


def _own_rows(
    whole: Sequence[Any], given: Sequence[Any], name: str | None, process_set: ProcessSet
) -> list[Any]:
    """Of what has the rows of all ranks, those that this rank gave."""
    counts = tf.stack([tf.shape(tensor, tf.int64)[0] for tensor in given])
    like = Output(tf.int64, [None])
    (table,) = collective(
        lambda found: allgather_async(found[0], name, process_set), [counts], [like], name
    )
    table = tf.reshape(table, [-1, len(given)])
    place = ask(lambda: process_set.rank() or 0, tf.int32)
    before = tf.reduce_sum(table[:place], axis=0)
    return [
        tensor[before[index] : before[index] + counts[index]] for index, tensor in enumerate(whole)
    ]


@unconverted
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The tensor of `root_rank`, as a new one, on every rank.

    Differentiable: the root's gradient is the average over the ranks, that of the others is 0.
    """
    del ignore_name_scope

    @tf.custom_gradient
    def sent(given: Any) -> Any:
        def back(gradient: Any) -> Any:
            how = Reduction.average(_of(name, "grad"), process_set)
            (averaged,) = collective(
                lambda found: start_one(found[0], how, quiet=True),
                [gradient],
                [Output.like(gradient)],
                how.name,
            )
            at_root = ask(lambda: int(session.current().rank == root_rank), tf.int32)
            return averaged * tf.cast(at_root, averaged.dtype)

        (result,) = collective(
            lambda found: broadcast_async(found[0], root_rank, name, process_set),
            [given],
            [Output.like(given)],
            name,
        )
        return result, back

    return sent(as_tensor(tensor, "broadcast"))


@unconverted
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Gives each rank some rows of `tensor`; returns the rows that the others gave to this one.

    `splits[r]` rows go to rank r; without it, all get the same number. With it, the result is a
    pair: the rows, and how many came from each rank. Differentiable.
    """
    del ignore_name_scope
    found = as_tensor(tensor, "alltoall")
    inputs = [found] if splits is None else [found, tf.cast(splits, tf.int64)]

    @tf.custom_gradient
    def sent(*given: Any) -> Any:
        def start(tensors: Any) -> Any:
            counts = tensors[1] if len(tensors) > 1 else None
            return alltoall_async(tensors[0], counts, name, process_set)

        outputs = [Output.rows_like(found), Output(tf.int32, [None])]
        rows, counts = collective(start, given, outputs, name)

        def back(gradient: Any, _: Any) -> list[Any]:
            returned, _ = alltoall(gradient, counts, _of(name, "grad"), process_set=process_set)
            shape = tf.shape(given[0])
            # Rows that went nowhere have a gradient of 0.
            missing = tf.concat([shape[:1] - tf.shape(returned)[:1], shape[1:]], 0)
            kept = tf.concat([returned, tf.zeros(missing, returned.dtype)], 0)
            return [kept, *[None for _ in given[1:]]]

        return (rows, counts), back

    rows, counts = sent(*inputs)
    return rows if splits is None else (rows, counts)

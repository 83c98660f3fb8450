"""All-reduce, of one tensor or of several at once, dense or sparse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from farandole.errors import UserError
from farandole.horovod.common.process_sets import ProcessSet, global_process_set
from farandole.horovod.tensorflow.basics import size_of
from farandole.horovod.tensorflow.bridge import Output, collective
from farandole.horovod.tensorflow.compression import Compression, Compressor
from farandole.horovod.tensorflow.framework import as_tensor, as_tensors, tf, unconverted
from farandole.horovod.tensorflow.movements import allgather
from farandole.horovod.torch.dense_reductions import Reduction, start_group, start_one
from farandole.horovod.torch.operations import LINEAR, Average


@unconverted
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """`tensor` combined over all ranks, as a new tensor; the average if nothing else is said.

    Of `tf.IndexedSlices`, all ranks' slices: their average or sum. Differentiable: the gradient is
    combined in the same way. `device_dense`, `device_sparse` and `ignore_name_scope` are Horovod's;
    memory is used where it is.
    """
    del device_dense, device_sparse, ignore_name_scope
    how = Reduction.asked(average, name, op, prescale_factor, postscale_factor, process_set)
    if isinstance(tensor, tf.IndexedSlices):
        return reduce_slices(tensor, how)
    (reduced,) = reduce_dense([as_tensor(tensor, "allreduce")], how, compression, grouped=False)
    return reduced


@unconverted
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Each tensor combined over all ranks, as new tensors, in one go. Differentiable.

    `tf.IndexedSlices` among them are sent one by one.
    """
    del device_dense, device_sparse, ignore_name_scope
    how = Reduction.asked(average, name, op, prescale_factor, postscale_factor, process_set)
    reduced: list[Any] = reduce_mixed(tensors, how, compression, "grouped_allreduce")
    return reduced


@unconverted
def reduce_mixed(
    tensors: Sequence[Any],
    how: Reduction,
    compression: type[Compressor],
    what: str,
    numbers: Sequence[int] | None = None,
) -> list[Any]:
    """The dense ones in one go, and slices one by one. `numbers`: those at the end of their names,
    if they are not to be counted from 0 on."""
    reduced = list(tensors)
    is_dense = [not isinstance(tensor, tf.IndexedSlices) for tensor in tensors]
    dense = [index for index, yes in enumerate(is_dense) if yes]
    if dense or not tensors:
        found = as_tensors([tensors[index] for index in dense], what)
        for index, result in zip(dense, reduce_dense(found, how, compression), strict=True):
            reduced[index] = result
    for index, tensor in enumerate(tensors):
        if not is_dense[index]:
            number = index if numbers is None else numbers[index]
            name = f"{how.name}.{number}" if how.name is not None else None
            reduced[index] = reduce_slices(tensor, how._replace(name=name))
    return reduced


@unconverted
def reduce_dense(
    tensors: Sequence[Any],
    how: Reduction,
    compression: type[Compressor] = Compression.none,
    *,
    grouped: bool = True,
) -> list[Any]:
    """New tensors. Differentiable."""
    pairs = [compression.compress(tensor) for tensor in tensors]

    @tf.custom_gradient
    def reduce(*given: Any) -> Any:
        def start(found: Any) -> Any:
            if grouped:
                return start_group(found, how, quiet=True)
            return start_one(found[0], how, quiet=True)

        def back(*gradients: Any) -> list[Any]:
            reduced: list[Any] = reduce_dense(gradients, how.of_gradient(), grouped=grouped)
            return reduced

        results = collective(start, given, [Output.like(one) for one in given], how.name)
        return (results if len(results) > 1 else results[0]), back

    reduced = reduce(*[small for small, _ in pairs])
    found = list(reduced) if len(pairs) > 1 else [reduced]
    return [
        compression.decompress(result, context)
        for result, (_, context) in zip(found, pairs, strict=True)
    ]


@unconverted
def reduce_slices(slices: Any, how: Reduction) -> Any:
    """All ranks' slices; those of one row are added up by whoever uses them, as always."""
    if how.op not in LINEAR:
        raise UserError(f"tf.IndexedSlices can be combined by Average and Sum, not by {how.op}.")
    part = (lambda of: f"{how.name}.{of}") if how.name is not None else (lambda of: None)
    values = allgather(slices.values, part("values"), process_set=how.process_set)
    indices = allgather(slices.indices, part("indices"), process_set=how.process_set)
    factor = how.scales[0] * how.scales[1]
    if factor != 1.0:
        values = values * tf.cast(factor, values.dtype)
    if how.op == Average:
        values = values / tf.cast(size_of(how.process_set), values.dtype)
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)

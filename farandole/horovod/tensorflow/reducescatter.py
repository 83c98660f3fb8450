"""Reduce-scatter: each rank gets its share of the rows of what was combined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from farandole.horovod.common.process_sets import ProcessSet, global_process_set
from farandole.horovod.tensorflow.basics import size_of
from farandole.horovod.tensorflow.bridge import Output, collective
from farandole.horovod.tensorflow.compression import Compression, Compressor
from farandole.horovod.tensorflow.framework import as_tensor, as_tensors, tf, unconverted
from farandole.horovod.tensorflow.movements import gather
from farandole.horovod.torch.operations import Average, Sum, chosen_op, require_linear
from farandole.horovod.torch.reducescatter import (
    grouped_reducescatter_async,
    reducescatter_async,
)


@unconverted
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: str = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """This rank's share of the rows of `tensor` combined over all ranks.

    If the rows cannot be shared evenly, the first ranks get one more. Differentiable.
    """
    del device_dense, ignore_name_scope
    found = [as_tensor(tensor, "reducescatter")]
    scales = (prescale_factor, postscale_factor)
    (result,) = _scattered(found, compression, op, name, process_set, scales, grouped=False)
    return result


@unconverted
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[Any]:
    """`reducescatter` of each tensor, in one go. Differentiable."""
    del device_dense
    found = as_tensors(tensors, "grouped_reducescatter")
    scales = (prescale_factor, postscale_factor)
    return _scattered(found, compression, op, name, process_set, scales, grouped=True)


def _scattered(
    tensors: Sequence[Any],
    compression: type[Compressor],
    op: str,
    name: str | None,
    process_set: ProcessSet,
    scales: tuple[float, float],
    *,
    grouped: bool,
) -> list[Any]:
    pairs = [compression.compress(tensor) for tensor in tensors]

    @tf.custom_gradient
    def scattered(*given: Any) -> Any:
        def start(found: Any) -> Any:
            if grouped:
                return grouped_reducescatter_async(found, name, op, process_set, *scales)
            return reducescatter_async(found[0], name, op, process_set, *scales)

        def back(*gradients: Any) -> list[Any]:
            # As Horovod has it: of a sum, each rank's gradient counts as that of an average does.
            chosen = chosen_op(None, op)
            require_linear(chosen)
            called = f"{name}.grad" if name is not None else None
            whole = gather(gradients, called, process_set, grouped=True)
            factor = tf.cast(size_of(process_set) if chosen == Sum else 1, tf.float64)
            factor = factor * scales[0] * scales[1]
            return [gradient * tf.cast(factor, gradient.dtype) for gradient in whole]

        results = collective(start, given, [Output.rows_like(one) for one in given], name)
        return (results if len(results) > 1 else results[0]), back

    reduced = scattered(*[small for small, _ in pairs])
    found = list(reduced) if len(pairs) > 1 else [reduced]
    return [
        compression.decompress(result, context)
        for result, (_, context) in zip(found, pairs, strict=True)
    ]

"""Horovod's optimizers for Keras: those of TensorFlow, with Keras's order of arguments."""

from __future__ import annotations

from typing import Any

from farandole.horovod.common.process_sets import ProcessSet, global_process_set
from farandole.horovod.keras.framework import accept_flag_of_horovod
from farandole.horovod.tensorflow import optimizer as inner
from farandole.horovod.tensorflow.compression import Compression, Compressor
from farandole.horovod.tensorflow.tape import layers_of
from farandole.horovod.torch.operations import Average


def DistributedOptimizer(  # noqa: N802
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: str = Average,
    num_groups: int = 0,
    groups: Any = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """`optimizer`, which from now on applies the gradients of all ranks.

    The arguments mean what they mean to `horovod.tensorflow.DistributedOptimizer`.
    """
    accept_flag_of_horovod()
    return inner.DistributedOptimizer(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        backward_passes_per_step=backward_passes_per_step,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        average_aggregated_gradients=average_aggregated_gradients,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )


def PartialDistributedOptimizer(  # noqa: N802
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: str = Average,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    **options: Any,
) -> Any:
    """`DistributedOptimizer` in which the variables of `local_layers` stay this rank's own.

    `options` are further ones of `DistributedOptimizer`.
    """
    made = DistributedOptimizer(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        **options,
    )
    for layer in layers_of(local_layers):
        for variable in layer.trainable_variables:
            made.register_local_var(variable)
    return made

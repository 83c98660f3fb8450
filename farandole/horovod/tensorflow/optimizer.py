"""An optimizer of Keras that applies the gradients of all ranks.

The optimizer stays the object that it is, with its state and its learning rate; it gets a class
whose `apply` combines the gradients first. The class has the name and the module of the original
one, so that what is saved can be loaded where there is no Farandole.
"""

from __future__ import annotations

from typing import Any

from farandole.errors import UserError
from farandole.horovod.common.process_sets import ProcessSet, global_process_set
from farandole.horovod.tensorflow.accumulation import Accumulation
from farandole.horovod.tensorflow.compression import Compression, Compressor
from farandole.horovod.tensorflow.framework import tf, unconverted
from farandole.horovod.tensorflow.gradients import GradientReduction
from farandole.horovod.torch.operations import Average


class _Distributed:
    """Goes before the class of an optimizer; `reduction` and `accumulation` are class attributes of
    the class that is made for one optimizer."""

    reduction: GradientReduction
    accumulation: Accumulation | None

    def register_local_var(self, variable: Any) -> None:
        """The gradient of this variable stays this rank's own."""
        self.reduction.keep_local([variable])

    @unconverted
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        original = super().apply  # type: ignore[misc]  # of the optimizer that comes after this
        if trainable_variables is None:
            variables = list(self._trainable_variables)
        else:
            variables = list(trainable_variables)
        gradients = list(grads)
        if len(gradients) != len(variables):
            raise UserError(
                f"{len(gradients)} gradients for {len(variables)} variables: each has one, or None."
            )
        if self.accumulation is None:
            return original(self.reduction(gradients, variables), trainable_variables)
        if not self.built:
            with tf.init_scope():
                self.build(variables)
        return self.accumulation(
            gradients,
            variables,
            lambda found: original(self.reduction(found, variables), trainable_variables),
            lambda: self.iterations.assign_add(1),
        )


def DistributedOptimizer(  # noqa: N802
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """`optimizer`, a Keras optimizer, which from now on applies the gradients of all ranks.

    With `backward_passes_per_step`, gradients are added up for so many calls, then combined and
    applied; `average_aggregated_gradients` divides them by that number.
    """
    del name, use_locking, device_dense, device_sparse
    reduction = GradientReduction.asked(
        op,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        process_set,
        scale_local_gradients,
        num_groups,
        groups,
    )
    if backward_passes_per_step < 1:
        raise UserError(f"backward_passes_per_step={backward_passes_per_step} must be 1 or more.")
    accumulation = (
        Accumulation(backward_passes_per_step, average_aggregated_gradients)
        if backward_passes_per_step > 1
        else None
    )
    return distributed(optimizer, reduction, accumulation)


def distributed(
    optimizer: Any, reduction: GradientReduction, accumulation: Accumulation | None
) -> Any:
    """The optimizer itself, with its new class. Raises `UserError` for what is none of Keras."""
    original = type(optimizer)
    if isinstance(optimizer, _Distributed):
        raise UserError(f"this {original.__name__} is distributed already.")
    if not isinstance(optimizer, tf.keras.optimizers.Optimizer):
        raise UserError(
            f"DistributedOptimizer wants a Keras optimizer, not a {original.__module__}."
            f"{original.__name__}. Optimizers of tf.compat.v1 and tf.keras.optimizers.legacy are "
            "for TensorFlow 1: use that of the same name in tf.keras.optimizers."
        )
    attributes = {"reduction": reduction, "accumulation": accumulation}
    made = type(original.__name__, (_Distributed, original), attributes)
    made.__module__ = original.__module__
    made.__qualname__ = original.__qualname__
    optimizer.__class__ = made
    return optimizer


def is_distributed(optimizer: Any) -> bool:
    return isinstance(optimizer, _Distributed)

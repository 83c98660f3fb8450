"""BatchNormalization over the samples of all ranks."""

from __future__ import annotations

from typing import Any

from farandole.errors import UserError
from farandole.horovod.common.process_sets import ProcessSet, global_process_set
from farandole.horovod.tensorflow.framework import tf
from farandole.horovod.tensorflow.reductions import allreduce
from farandole.horovod.torch.operations import Sum


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):
    """Takes the place of `tf.keras.layers.BatchNormalization`; ranks may have batches of different
    sizes. Mean and variance are two sums over all ranks, the second of the distances to the mean:
    a difference of two large sums would lose digits."""

    def __init__(
        self, fused: bool = False, process_set: ProcessSet = global_process_set, **kwargs: Any
    ) -> None:
        if fused or kwargs.pop("synchronized", False) or kwargs.pop("renorm", False):
            raise UserError(
                "SyncBatchNormalization has its own sums: leave out fused, renorm and synchronized."
            )
        super().__init__(**kwargs)
        self._process_set = process_set
        self.supports_jit = False  # XLA cannot call Python

    def _moments(self, inputs: Any, mask: Any) -> Any:
        weights = tf.ones_like(inputs)
        if mask is not None:
            weights = weights * tf.cast(tf.expand_dims(mask, -1), inputs.dtype)
        axes = [axis for axis in range(inputs.shape.rank) if axis != self.axis % inputs.shape.rank]
        count = self._total(tf.reduce_sum(weights, axes))
        mean = self._total(tf.reduce_sum(inputs * weights, axes)) / count
        shape = [1] * inputs.shape.rank
        shape[self.axis] = -1
        apart = (inputs - tf.reshape(mean, shape)) * weights
        return mean, self._total(tf.reduce_sum(apart * apart, axes)) / count

    def _total(self, tensor: Any) -> Any:
        return allreduce(tensor, op=Sum, process_set=self._process_set)

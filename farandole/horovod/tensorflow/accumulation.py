"""Gradients that are added up over several backward passes before they travel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from farandole.errors import UserError
from farandole.horovod.tensorflow.framework import as_dense, tf, unconverted


class Accumulation:
    """Of one optimizer: sums by variable, and how many passes are in them."""

    def __init__(self, passes: int, average: bool) -> None:
        self._passes = passes
        self._average = average
        self._count: Any = None
        self._sums: list[Any] = []

    @unconverted
    def __call__(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        apply: Callable[[list[Any]], Any],
        skip: Callable[[], Any],
    ) -> None:
        """Adds the gradients of a pass; `apply`s all after the last one, and else `skip`s."""
        self._make(gradients, variables)
        for kept, gradient, variable in zip(self._sums, gradients, variables, strict=True):
            if gradient is None:
                continue
            if kept is None:
                raise UserError(
                    f"{variable.name!r} has a gradient now, and had none in the first pass. With "
                    "backward_passes_per_step, the same variables must have gradients in all."
                )
            kept.assign_add(tf.cast(as_dense(gradient), kept.dtype))
        self._count.assign_add(1)

        def finish() -> Any:
            found = [
                None if kept is None else kept / self._passes if self._average else kept.value()
                for kept in self._sums
            ]
            apply(found)
            for kept in self._sums:
                if kept is not None:
                    kept.assign(tf.zeros_like(kept))
            self._count.assign(0)
            return tf.constant(True)

        def go_on() -> Any:
            skip()
            return tf.constant(False)

        tf.cond(tf.equal(self._count, self._passes), finish, go_on)

    def _make(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Outside the graph that is being traced, which may be traced again."""
        if self._count is not None:
            return
        with tf.init_scope():
            self._count = tf.Variable(0, trainable=False, dtype=tf.int64)
            self._sums = [
                None
                if gradient is None
                else tf.Variable(tf.zeros(variable.shape, gradient.dtype), trainable=False)
                for gradient, variable in zip(gradients, variables, strict=True)
            ]

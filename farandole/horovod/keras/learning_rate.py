"""Learning rates that change in the course of a training: by a schedule, or as it warms up."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from farandole.errors import UserError
from farandole.horovod.keras.framework import keras
from farandole.horovod.torch.basics import size


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """The learning rate is `initial_lr` times `multiplier`, a number or a function of the epoch,
    from `start_epoch` on and before `end_epoch`.

    With `staircase` it changes once in an epoch, otherwise with every batch, of which there must
    be `steps_per_epoch`; then the function is called with fractions of epochs.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None or not initial_lr > 0:
            raise UserError(f"initial_lr={initial_lr!r} must be a number above 0.")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        if not callable(multiplier) and multiplier != 1 and end_epoch != start_epoch + 1:
            warnings.warn(
                f"{type(self).__name__}: multiplier={multiplier} is the same in all epochs, as "
                "Horovod documents. Horovod 0.28 computed a power of it instead: for that, "
                f"give multiplier=lambda epoch: {multiplier} ** (epoch - {start_epoch}).",
                stacklevel=2,
            )
        # A number stays what it is in the course of an epoch.
        self.staircase = staircase if callable(multiplier) else True
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier
        self.current_epoch = 0
        self._momentum: float | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise UserError(
                    f"{type(self).__name__}: the number of batches in an epoch is not known. Give "
                    "steps_per_epoch=…"
                )
        if self.momentum_correction and self._has_momentum() and not self.model.run_eagerly:
            warnings.warn(
                f"{type(self).__name__}: Keras 3 compiles the optimizer's momentum into its graph, "
                "so it is not corrected when the learning rate changes. Give "
                "momentum_correction=False, or compile(run_eagerly=True) to have it corrected.",
                stacklevel=2,
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        before = self.end_epoch is None or self.current_epoch < self.end_epoch
        if self.current_epoch < self.start_epoch or not before:
            return
        if self.staircase:
            if batch == 0:
                self._set(float(self.current_epoch))
        else:
            assert self.steps_per_epoch is not None
            self._set(self.current_epoch + batch / self.steps_per_epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._momentum is not None:
            self.model.optimizer.momentum, self._momentum = self._momentum, None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)

    def _set(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        before = float(optimizer.learning_rate)
        now = self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = now
        if self.momentum_correction and self._has_momentum() and self.model.run_eagerly:
            # What has gathered momentum at the old rate shall count as if at the new one.
            self._momentum = optimizer.momentum
            optimizer.momentum = self._momentum * now / before

    def _has_momentum(self) -> bool:
        return bool(getattr(self.model.optimizer, "momentum", 0))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """From `initial_lr` divided by the number of ranks to `initial_lr`, in `warmup_epochs`.

    A global batch that is as many times larger as there are ranks allows a learning rate that is
    as many times higher, though not from the first step on (Goyal et al., 2017).
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        if not warmup_epochs > 0:
            raise UserError(f"warmup_epochs={warmup_epochs} must be above 0.")

        def rising(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            # One batch more, so that an epoch ends at a round value.
            done = min((epoch + 1.0 / self.steps_per_epoch) / warmup_epochs, 1.0)
            return (1.0 + done * (size() - 1)) / size()

        super().__init__(
            initial_lr,
            rising,
            start_epoch=0,
            end_epoch=-(-warmup_epochs // 1),  # type: ignore[arg-type]
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.verbose > 0 and self.end_epoch is not None and epoch == self.end_epoch - 1:
            rate = float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")

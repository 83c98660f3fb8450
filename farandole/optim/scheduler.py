"""A torch scheduler that follows a curve: stepped once per optimizer step, resumed exactly.

The rate is always computed from the step's number, never from the previous rate, so nothing
accumulates: a resumed run sees the very floats that an uninterrupted one does. What is saved is
the position only. The curve comes from the script, which may meanwhile run on other numbers of
workers; the position is therefore carried over in epochs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from farandole.errors import UserError
from farandole.optim.momentum import check_rate_is_absorbed, rescale_momentum


class RateScheduler(LRScheduler):
    """Sets every parameter group's rate to `curve(step)` times the group's share.

    A group whose rate is `base_rate` has share 1, one with a tenth of it 0.1, and so on: the
    optimizer is built with the rates that fit the base batch. When all groups have the same rate
    that rate is replaced, whatever it was. When they differ and none is `base_rate`, it is
    unclear which of them the curve describes, and a `UserError` says so.

    With `rate_absorbed_by`, the name of a momentum buffer in the optimizer's state, every change
    of the rate is followed by the momentum correction of that buffer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        curve: Callable[[int], float],
        *,
        base_rate: float,
        steps_per_epoch: int,
        rate_absorbed_by: str | None = None,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UserError(
                f"A {type(optimizer).__name__} is not a torch.optim.Optimizer. Build the "
                "optimizer first, then put it under the recipe."
            )
        if rate_absorbed_by is not None:
            check_rate_is_absorbed(optimizer, rate_absorbed_by)
        self.curve = curve
        self.steps_per_epoch = steps_per_epoch
        self.rate_absorbed_by = rate_absorbed_by
        self.shares = _shares(optimizer, base_rate)
        super().__init__(optimizer)  # sets the rates of step 0

    def get_lr(self) -> list[float | torch.Tensor]:
        """The rates of the current step, one per parameter group."""
        rate = self.curve(self.last_epoch)
        return [rate * share for share in self.shares]

    def step(self, epoch: int | None = None) -> None:
        """Move to the next step's rate; call it after `optimizer.step()`."""
        old_rates = self._rates()
        super().step(epoch)
        if self.rate_absorbed_by is not None:
            rescale_momentum(self.optimizer, old_rates, self._rates(), self.rate_absorbed_by)

    def state_dict(self) -> dict[str, Any]:
        """The position: two whole numbers, fit for JSON."""
        return {"step": self.last_epoch, "steps_per_epoch": self.steps_per_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a saved position and set its rates.

        If an epoch had another number of steps when it was saved (another number of workers),
        the position is the same epoch, at the nearest step. Load the optimizer first: its state
        contains the saved rates, and these would otherwise replace the ones set here.
        """
        missing = {"step", "steps_per_epoch"} - state_dict.keys()
        if missing:
            raise UserError(
                f"This is not the state of a RateScheduler: {sorted(missing)} missing, found "
                f"{sorted(state_dict)}. Pass what its state_dict() returned."
            )
        step = round(state_dict["step"] * self.steps_per_epoch / state_dict["steps_per_epoch"])
        self.last_epoch = step - 1
        self._initial_step()  # the base class's own start: sets the rates of last_epoch + 1

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]


def _shares(optimizer: torch.optim.Optimizer, base_rate: float) -> list[float]:
    # A group that has been scheduled before, or comes from a checkpoint, remembers the rate it
    # was built with as `initial_lr`; its `lr` is wherever that schedule had arrived.
    rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
    if len(set(rates)) == 1:
        return [1.0] * len(rates)
    reference = next((rate for rate in rates if math.isclose(rate, base_rate)), None)
    if reference is None:
        raise UserError(
            f"The parameter groups have the rates {rates}, and none of them is "
            f"base_rate={base_rate:g}. Build the optimizer with the rates that fit the base batch "
            "and pass one of them as base_rate: the others keep their ratio to it."
        )
    return [rate / reference for rate in rates]

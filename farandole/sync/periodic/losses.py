"""The loss that strategies steer by: reported batch by batch, or else what the script logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from farandole.errors import UserError


class Losses:
    """This rank's losses. Nothing here waits for a GPU until somebody asks."""

    def __init__(self) -> None:
        self.weight = 1.0  # of the batch under way: see `Weighing`
        self.logged: float | None = None  # the last that the script logged on this rank
        self.logs = 0
        self._sum: torch.Tensor | float = 0.0
        self._count = 0.0

    def observe_loss(self, loss: torch.Tensor | float) -> None:
        if isinstance(loss, torch.Tensor) and loss.numel() != 1:
            raise UserError(
                "run.observe_loss(loss) takes one number; this tensor has shape "
                f"{tuple(loss.shape)}. Pass its mean."
            )
        # The sum stays a tensor on the loss's device: adding to it queues work and waits for none.
        value = loss.detach().double() if isinstance(loss, torch.Tensor) else float(loss)
        self._sum = self._sum + value * self.weight
        self._count += self.weight

    def hear(self, loss: float) -> None:
        self.logged = loss
        self.logs += 1

    def take(self) -> tuple[float, float]:
        """Sum and number of the losses reported since the last time, by the batches' weights."""
        taken = float(self._sum), self._count
        self._sum, self._count = 0.0, 0.0
        return taken

    def state_dict(self) -> dict[str, Any]:
        return {
            "sum": float(self._sum),
            "count": self._count,
            "logged": self.logged,
            "logs": self.logs,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sum, self._count = state["sum"], state["count"]
        self.logged, self.logs = state["logged"], state["logs"]

"""`Trainer`: the step is Farandole's, the loop stays the script's.

It does what a hand-written step does, and tells the strategy the loss, which a script forgets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from farandole.data import Loader
from farandole.errors import UserError
from farandole.sync import AllReduce, Strategy

if TYPE_CHECKING:
    from farandole.train.run import Run

LossFunction = Callable[[Any, Any], torch.Tensor]
MakeOptimizer = Callable[[Iterator[nn.Parameter]], Optimizer]


class Trainer:
    """Made by `run.trainer`. Every method is called by all ranks *together*."""

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        loss: LossFunction,
        make_optimizer: MakeOptimizer,
        *,
        layout: object = None,
        sync: Strategy | None = None,
    ) -> None:
        if layout is not None:
            strategy = run.settings.sync or sync or AllReduce()
            raise UserError(
                f"{strategy} keeps whole replicas in step, one on each worker, and cannot serve "
                f"layout={layout!r}. Leave the layout out."
            )
        self._run = run
        self._loss = loss
        self.model, self.optimizer = run.distribute(
            model, make_optimizer(model.to(run.device).parameters()), sync=sync
        )

    def loader(self, source: Any, batch_size: int | None = None, **options: Any) -> Loader:
        """As `run.loader`."""
        return self._run.loader(source, batch_size, **options)

    def step(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Trains on one batch; returns its loss, of this rank, before the step."""
        self.optimizer.zero_grad()
        loss = self._loss(self.model(inputs), targets)
        loss.backward()
        self._run.report(loss)
        self.optimizer.step()
        return loss.detach()

    def save(self, path: str | Path | None = None, **state: Any) -> Path:
        """As `run.save`."""
        return self._run.save(path, **state)

    def load(self, path: str | Path | None = None) -> dict[str, Any] | None:
        """As `run.load`."""
        return self._run.load(path)

"""`Trainer`: the step is Farandole's, the loop stays the script's.

It does what a hand-written step does, and tells the strategy the loss, which a script forgets. With
a layout the model is cut into stages, and the step is a pipeline's; the script stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from farandole.data import Loader
from farandole.layout import Layout
from farandole.sync import Strategy
from farandole.train.elastic.support import refuse_trainer_options
from farandole.train.engines.engine import Engine, WholeModelEngine
from farandole.train.engines.recipe import Recipe
from farandole.train.passes import Passes
from farandole.train.session import Session


class DataAndCheckpoints(Protocol):
    """What a trainer hands on to its run."""

    @property
    def loader(self) -> Callable[..., Loader]: ...

    def save(
        self, path: str | Path | None = None, *, background: bool = False, **state: Any
    ) -> Path | str: ...

    def load(self, path: str | Path | None = None) -> dict[str, Any] | None: ...


class Trainer:
    """Made by `run.trainer`. Every method is called by all ranks *together*."""

    def __init__(
        self,
        run: DataAndCheckpoints,
        session: Session,
        passes: Passes,
        model: nn.Module | Sequence[nn.Module],
        recipe: Recipe,
        *,
        layout: Layout | None = None,
        sync: Strategy | None = None,
        sample: Any = None,
        check: bool = True,
    ) -> None:
        self._run = run
        self._session = session
        self._passes = passes
        whole = model if isinstance(model, nn.Module) else nn.Sequential(*model)
        self._engine: Engine
        if session.most_workers is not None:
            refuse_trainer_options(recipe.precision, layout)
        if layout is None:
            self._engine = WholeModelEngine(session, whole, recipe, sync)
            return
        # Imported here: scripts without a layout need not wait for the code of stages and tiles.
        from farandole.train.engines.pipelined import PipelinedEngine

        self._engine = PipelinedEngine(session, whole, recipe, layout, sync, sample, check=check)

    @property
    def model(self) -> nn.Module:
        """What the strategy keeps in step: the model, or the stages of it that this rank holds."""
        return self._engine.model

    @property
    def optimizer(self) -> Optimizer:
        """Of the parameters that this rank holds."""
        return self._engine.optimizer

    @property
    def layout(self) -> Layout | None:
        """With nothing left open: its stages and balance are those found. None: no layout."""
        return self._session.layout

    def loader(self, source: Any, batch_size: int | None = None, **options: Any) -> Loader:
        """As `run.loader`. Replicas get different shares, the ranks of one replica the same; of a
        dataset that can read parts of images (see `TileSource`) a rank reads its tile alone."""
        read, finish = self._engine.reading(source)
        loader = self._run.loader(read, batch_size, **options)
        if finish is not None:
            loader.finish = finish
        return loader

    def step(self, inputs: Any, targets: Any = None) -> torch.Tensor:
        """Trains on one batch; returns its loss, of this replica, before the step.

        A tuple or a list of inputs are the positional arguments of the model's forward, a
        dictionary its keyword arguments; anything else is its one argument. With `loss=None`, when
        the model computes its own loss, the targets are one more argument, the last.

        Under pipedream and 2bw, where several batches are under way, it is the loss of the last one
        that this rank is done with, and NaN before there is one.
        """
        loss = self._engine.step(inputs, targets)
        self._session.group.meter.activity.step()
        return loss

    def predict(self, inputs: Any) -> Any:
        """The model's output in evaluation mode, without gradients, on every rank of a replica.

        `inputs` are all arguments of the model's forward, as in `step`.
        """
        self._passes.warn_of_shared_samples()
        return self._engine.predict(inputs)

    def save(
        self, path: str | Path | None = None, *, background: bool = False, **state: Any
    ) -> Path | str:
        """As `run.save`: one whole model, which can be loaded under any other layout."""
        return self._run.save(path, background=background, **state)

    def load(self, path: str | Path | None = None) -> dict[str, Any] | None:
        """As `run.load`."""
        return self._run.load(path)

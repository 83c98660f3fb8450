"""`Run`: what a script holds. Layout, sync and data meet here, and nowhere else.

It only hands on: each of its parts is an object of its own, and they share a `Session`. Methods
that belong together are in base classes: `RunInfo`, `RunCheckpointing`, `RunChoices`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from farandole.comm import Group
from farandole.data import Loader, LoaderOptions
from farandole.layout import Layout
from farandole.layout.objective import LossFunction, LossWeight
from farandole.sync import AllReduce, InStep, Strategy, in_step
from farandole.topology import Topology
from farandole.trace.spans import NO_TRACE
from farandole.train.checkpoint.automatic.policy import Checkpoints
from farandole.train.checkpoint.run_saving import RunSaving
from farandole.train.choosing.choices import Choices
from farandole.train.choosing.run_choices import RunChoices
from farandole.train.counters import TrainingProgress
from farandole.train.distribute import distribute_whole
from farandole.train.distributed_models import DistributedModels
from farandole.train.elastic.start import most_workers
from farandole.train.elastic.training import ElasticTraining
from farandole.train.engines.recipe import MakeOptimizer, Recipe
from farandole.train.loaders import RunLoaders
from farandole.train.mirror.loop import OtherLoop
from farandole.train.numbers import T
from farandole.train.passes import Passes
from farandole.train.progress import EpochProgress
from farandole.train.run_metrics import RunMetrics
from farandole.train.run_parts.checkpointing import RunCheckpointing
from farandole.train.run_parts.closing import Closing
from farandole.train.run_parts.epochs import run_epochs
from farandole.train.run_parts.info import RunInfo
from farandole.train.run_parts.naming import agree_on_name
from farandole.train.run_parts.totals import Totals
from farandole.train.session import Session
from farandole.train.settings import Settings, read_layout
from farandole.train.spans import Watch
from farandole.train.trainer import Trainer
from farandole.worker.environment import hide_rank_variables
from farandole.worker.run_reporter import run_reporter
from farandole.worker.trial.clock import is_trial


class Run(RunInfo, RunCheckpointing, RunChoices):
    """One rank's view of a job. Made by `fd.init()`; a run that is alone is rank 0 of 1.

    Methods marked *together* must be called by all ranks, in the same order.
    """

    def __init__(
        self,
        group: Group,
        topology: Topology,
        device: torch.device,
        *,
        settings: Settings,
        name: str | None = None,
        folder: Path = Path("runs"),
        seed: int = 0,
        check_in_step: bool = True,
        check_finite: bool = True,
        fallback: bool = False,
        checkpoints: Checkpoints | None = None,
        elastic: ElasticTraining | None = None,
    ) -> None:
        place = settings.folder or folder
        named = agree_on_name(group, place, settings.name or name, settings.script, elastic)
        self.name = named.name
        progress = TrainingProgress()
        said = settings.check_finite
        self._session = Session(
            group,
            topology,
            device,
            settings,
            place / self.name,
            seed,
            settings.sync or AllReduce(),
            DistributedModels(
                lambda: progress.steps,
                check_finite=check_finite if said is None else said,
                check_in_step=check_in_step,
            ),
            progress,
            replicas=group,
            bar=EpochProgress() if group.rank == 0 else None,
            watch=Watch(group.trace) if group.trace is not NO_TRACE else None,
            most_workers=None if elastic is None else most_workers(),
            reporter=run_reporter(self.name) if group.rank == 0 else None,
        )
        group.meter.go_on_from(waited_seconds=0.0, bytes_sent=0)  # from here on, like the clock
        self._metrics = RunMetrics(self._session)
        self._choices = Choices(self._session, self._metrics)
        self._passes = Passes(self._session, self._metrics)
        self._loaders = RunLoaders(self._session, self._passes)
        self._passes.elastic = elastic
        self._saving = RunSaving(
            self._session,
            self._loaders,
            self._metrics,
            self._passes,
            None if is_trial() else settings.checkpoints or checkpoints,
            elastic,
            fallback=settings.fallback or fallback,
        )
        self._totals = Totals(self._session, self._passes)
        self._closing = Closing(
            self._session,
            self._passes,
            self._loaders,
            self._choices,
            self._metrics,
            self._saving,
            named,
        )
        if elastic is not None:
            elastic.attach(self._session, self._loaders)

    def hide_from_libraries(self) -> None:
        """Removes the launcher's variables (`RANK`, `WORLD_SIZE`, …) from this process.

        Libraries that would start a distributed scheme of their own where they find them, such as
        Accelerate and Hugging Face's Trainer, then take this process for one that is alone.
        """
        hide_rank_variables(os.environ)

    @property
    def other_loop(self) -> OtherLoop:
        """For front-ends of other frameworks, whose batches do not come from `loader`."""
        return OtherLoop(self._session, self._passes)

    # Models

    @overload
    def distribute(self, model: nn.Module, *, sync: Strategy | None = None) -> nn.Module: ...

    @overload
    def distribute(
        self, model: nn.Module, optimizer: Optimizer, *, sync: Strategy | None = None
    ) -> tuple[nn.Module, Optimizer]: ...

    def distribute(
        self, model: nn.Module, optimizer: Optimizer | None = None, *, sync: Strategy | None = None
    ) -> nn.Module | tuple[nn.Module, Optimizer]:
        """*Together.* Moves `model` to this rank's device and keeps the replicas in step.

        The strategy is the command line's `--sync` if there is one, else `sync`, else all-reduce.
        All ranks start from rank 0's parameters, buffers and optimizer state. Raises
        `ModelMismatchError` naming the tensor and both shapes when the ranks' models differ.
        """
        distributed = distribute_whole(self._session, model, optimizer, sync)
        return distributed if optimizer is None else (distributed, optimizer)

    def trainer(
        self,
        model: nn.Module | Sequence[nn.Module],
        loss: LossFunction | None,
        make_optimizer: MakeOptimizer,
        *,
        layout: Layout | str | None = None,
        sync: Strategy | None = None,
        sample: Any = None,
        clip: float | None = None,
        precision: torch.dtype | None = None,
        loss_weight: LossWeight | None = None,
        check: bool = True,
    ) -> Trainer:
        """*Together.* As `distribute`, but the step is ours: `trainer.step(x, y)`.

        `loss(model(x), y)` is what is minimised, by `make_optimizer(parameters)`; with None the
        model computes its own loss, of `model(x, y)` or of keyword arguments. `layout` says
        where one replica of the model lives; the command line's `--layout` wins over it. `sample`,
        the model's arguments for a batch, lets it see and measure where to cut. Gradients are
        clipped to the norm `clip`; `precision`, `torch.bfloat16` or `torch.float16`, is for what
        autocast lowers. `loss_weight(x, y)` is what a mean loss is divided by, where that is not
        the number of samples: micro-batches count by it. Before the first step a layout is held
        against the plain model on a small batch, unless `check=False`.
        """
        chosen = self.settings.layout or layout
        if isinstance(chosen, str):
            chosen = read_layout(chosen)
        return Trainer(
            self,
            self._session,
            self._passes,
            model,
            Recipe(loss, make_optimizer, clip, precision, loss_weight),
            layout=None if chosen == Layout() else chosen,
            sync=sync,
            sample=sample,
            check=check,
        )

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The plain model. `distribute` puts nothing around it, so that is the model itself."""
        return self._session.models.synchronizer_of(model).model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, backward passes accumulate gradients without communication."""
        return self._session.models.synchronizer_of(model).no_sync()

    def check_in_step(self, model: nn.Module) -> InStep:
        """*Together.* Whether all ranks hold the same bytes; falsy, with names, when not."""
        self._passes.settle()
        return in_step(model, self._session.replicas)

    # Data

    def loader(
        self,
        source: Dataset[Any] | DataLoader[Any],
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        shuffle: bool | None = None,
        drop_last: bool = False,
        training: bool | None = None,
        shares: str = "equal",
        **torch_options: Any,
    ) -> Loader:
        """*Together.* This rank's share of `source`, on this rank's device.

        A dataset is shuffled unless `shuffle` is False; a DataLoader as it was told to be. A pass
        that is read with gradients enabled trains, and one under `torch.no_grad()` evaluates; where
        a script does otherwise, `training` says which it is.

        With `shares="speed"`, slower workers get fewer samples of each step, as they are measured.

        Calling it again with the same source and options, as one does inside the loop over epochs,
        gives the same loader, which then goes on to its next epoch; where options change from epoch
        to epoch, it gives a new one that goes on with the old one's epochs. Every sample counts
        once per epoch, and all ranks take the same number of steps. Further options are those of
        DataLoader, and the loader can be asked what a DataLoader can.
        """
        options = LoaderOptions(
            batch_size, global_batch_size, shuffle, drop_last, self.seed, training, shares
        )
        return self._loaders.get(source, options, torch_options)

    def epochs(self, count: int) -> Iterator[int]:
        """`range(count)`, except that a resumed run starts where it stopped.

        With automatic checkpoints, a run goes on from the newest one, as if the script had called
        `load` before.
        """
        return run_epochs(self.name, count, self._session, self._passes, self._saving)

    def observe_loss(self, loss: float | torch.Tensor) -> None:
        """Tells the strategies the loss of this rank's batch: AdaComm and DASO steer by it.

        Costs next to nothing; a loss that is on a GPU is not waited for. Scripts that do not call
        it are steered by what they `log` as `loss`.
        """
        self._session.models.observe_loss(loss)

    # Numbers

    def mean(self, value: T, weight: float = 1.0) -> T:
        """*Together.* The mean of `value` over all ranks, each counted `weight` times."""
        return self._totals.mean(value, weight)

    def sum(self, value: T) -> T:
        """*Together.* The sum of `value` over all ranks; as in torch, integers add up to int64."""
        return self._totals.sum(value)

    def log(self, **metrics: float | torch.Tensor | str) -> None:
        """Writes to `runs/<name>/metrics.jsonl` and TensorBoard, and prints a line. Rank 0 only.

        The other ranks' calls do nothing: pass what `mean` and `sum` return.
        """
        self._metrics.log(**metrics)

    def print(self, *values: object) -> None:
        """Prints on rank 0, above the progress bar if there is one."""
        self._session.print(*values)

    # The end

    def close(self) -> None:
        """Writes the end of the metrics. Called at the end of the script; waits for no other rank,
        but for a save in the background. Raises `CheckpointError` if that has failed.
        """
        self._closing.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

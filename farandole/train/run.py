"""`Run`: what a script holds. Layout, sync and data meet here, and nowhere else.

It is a face: each of its parts is an object of its own, and they share a `Session`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from farandole.comm import Group
from farandole.data import Loader, LoaderOptions, Request
from farandole.errors import UserError
from farandole.layout import Layout
from farandole.layout.objective import LossFunction, LossWeight
from farandole.sync import AllReduce, InStep, Strategy, in_step
from farandole.topology import Topology
from farandole.trace.spans import NO_TRACE
from farandole.train.checkpoint.automatic.policy import Checkpoints
from farandole.train.checkpoint.run_saving import RunSaving
from farandole.train.choosing.choices import Choices
from farandole.train.choosing.run_choices import RunChoices
from farandole.train.claim import Claim, claim
from farandole.train.counters import TrainingProgress
from farandole.train.distribute import distribute_whole
from farandole.train.distributed_models import DistributedModels
from farandole.train.elastic.start import most_workers
from farandole.train.elastic.training import ElasticTraining
from farandole.train.engines.recipe import MakeOptimizer, Recipe
from farandole.train.loaders import RunLoaders
from farandole.train.mirror.loop import OtherLoop
from farandole.train.numbers import T, double, like
from farandole.train.passes import Passes
from farandole.train.progress import EpochProgress
from farandole.train.run_metrics import RunMetrics
from farandole.train.session import Session
from farandole.train.settings import Settings, check_name, default_name, read_layout
from farandole.train.spans import Watch
from farandole.train.trainer import Trainer
from farandole.worker.environment import hide_rank_variables
from farandole.worker.run_reporter import run_reporter
from farandole.worker.trial.clock import is_trial


class Run(RunChoices):
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
        self._claim: Claim | None = None  # of a folder that nobody named
        self.name = self._chosen_name(group, place, settings.name or name, settings, elastic)
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
        self._elastic = self._passes.elastic = elastic
        self._saving = RunSaving(
            self._session,
            self._loaders,
            self._metrics,
            self._passes,
            None if is_trial() else settings.checkpoints or checkpoints,
            elastic,
            fallback=settings.fallback or fallback,
        )
        if elastic is not None:
            elastic.attach(self._session, self._loaders)

    def _chosen_name(
        self,
        group: Group,
        place: Path,
        chosen: str | None,
        settings: Settings,
        elastic: ElasticTraining | None,
    ) -> str:
        if chosen is None and elastic is not None:
            chosen = elastic.name_before()
        if chosen is None:
            chosen = default_name(settings.script or "run")
            if group.rank == 0:
                self._claim = claim(place, chosen)
                chosen = self._claim.name
        agreed: str = group.broadcast_json(check_name(chosen))
        if elastic is not None and group.rank == 0:
            elastic.keep_name(agreed)  # where all workers are lost, others go on in this folder
        return agreed

    # Who am I?

    @property
    def group(self) -> Group:
        return self._session.group

    @property
    def topology(self) -> Topology:
        return self._session.topology

    @property
    def device(self) -> torch.device:
        return self._session.device

    @property
    def settings(self) -> Settings:
        return self._session.settings

    @property
    def folder(self) -> Path:
        """Where this run's metrics and checkpoints go."""
        return self._session.folder

    @property
    def seed(self) -> int:
        return self._session.seed

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def local_rank(self) -> int:
        return self.topology.local_rank(self.rank)

    @property
    def local_size(self) -> int:
        return self.topology.local_size(self.rank)

    @property
    def host(self) -> str:
        return self.topology.host(self.rank).name

    # How far has it come?

    @property
    def samples(self) -> int:
        """Trained on so far, by all ranks together."""
        return self._session.progress.samples

    @property
    def steps(self) -> int:
        return self._session.progress.steps

    @property
    def epoch(self) -> int:
        return self._session.progress.epoch

    @property
    def resumed(self) -> bool:
        return self._session.progress.resumed

    @property
    def seconds(self) -> float:
        """Since the run began; a resumed run goes on where the saved one stopped."""
        return self._session.progress.seconds

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
        ours = {
            "batch_size": batch_size,
            "global_batch_size": global_batch_size,
            "shuffle": shuffle,
            "drop_last": drop_last or None,
            "training": training,
            "shares": shares if shares != "equal" else None,
        }
        given = {name: value for name, value in ours.items() if value is not None}
        options = LoaderOptions(
            batch_size, global_batch_size, shuffle, drop_last, self.seed, training, shares
        )
        progress = self._session.progress
        request = Request(
            source,
            {**given, **torch_options},
            training=options.is_training,
            run_epoch=progress.epoch if progress.epoch_under_way else None,
        )
        return self._loaders.get(request, options, **torch_options)

    def epochs(self, count: int) -> Iterator[int]:
        """`range(count)`, except that a resumed run starts where it stopped.

        With automatic checkpoints, a run goes on from the newest one, as if the script had called
        `load` before.
        """
        progress, automatic = self._session.progress, self._passes.automatic
        self._saving.resume_by_itself()
        if self._elastic is not None:
            self._elastic.join_running()
        if progress.resumed and progress.epoch >= count:
            self.print(f"{self.name}: all {count} epochs are done already")
        progress.total_epochs = count
        end = min(count, self.settings.until_epoch or count)
        while (epoch := self.group.transport.begin_epoch(min(progress.epoch, end))) < end:
            progress.begin_epoch(epoch)
            if automatic is not None:
                automatic.begin_epoch()
            if self._elastic is not None:
                self._elastic.begin_epoch(epoch)
            yield epoch
            progress.end_epoch()
            if automatic is not None:
                automatic.end_of_epoch(last=epoch + 1 >= end)

    def observe_loss(self, loss: float | torch.Tensor) -> None:
        """Tells the strategies the loss of this rank's batch: AdaComm and DASO steer by it.

        Costs next to nothing; a loss that is on a GPU is not waited for. Scripts that do not call
        it are steered by what they `log` as `loss`.
        """
        self._session.models.observe_loss(loss)

    # Numbers

    def mean(self, value: T, weight: float = 1.0) -> T:
        """*Together.* The mean of `value` over all ranks, each counted `weight` times."""
        self._passes.settle()
        part = double(value) * float(weight)
        # In one collective: if a rank is lost, its part is in the sum and in the weights, or in
        # neither.
        both = torch.cat([part.reshape(-1), part.new_tensor([float(weight)])])
        total = self._added_up(both)
        return like(value, (total[:-1] / total[-1]).reshape(part.shape))

    def sum(self, value: T) -> T:
        """*Together.* The sum of `value` over all ranks; as in torch, integers add up to int64."""
        self._passes.settle()
        if isinstance(value, torch.Tensor) and not value.is_floating_point():
            return self._added_up(value.detach().to(torch.int64, copy=True))
        return like(value, self._added_up(double(value)))

    def _added_up(self, value: torch.Tensor) -> torch.Tensor:
        before = self.group.generation
        total = self.group.all_reduce(value)
        if self.group.generation != before:
            self.print(
                f"note: a worker was lost before this sum or mean over all ranks; what it had to "
                f"add may be missing. It is of {self.size} workers."
            )
        return total

    def log(self, **metrics: float | torch.Tensor | str) -> None:
        """Writes to `runs/<name>/metrics.jsonl` and TensorBoard, and prints a line. Rank 0 only.

        The other ranks' calls do nothing: pass what `mean` and `sum` return.
        """
        self._metrics.log(**metrics)

    def print(self, *values: object) -> None:
        """Prints on rank 0, above the progress bar if there is one."""
        self._session.print(*values)

    # Checkpoints

    def save(
        self,
        path: str | Path | None = None,
        *,
        keep: int | None = None,
        background: bool = False,
        **state: Any,
    ) -> Path | str:
        """*Together.* Saves everything needed to go on: models, optimizers, strategy, epoch,
        positions of the loaders, random state, and `state` of your own (numbers, tensors, dicts).

        `path` is a folder that holds checkpoints, `runs/<name>/checkpoints` by default, or the URL
        of one in an object store; the newest `keep` stay, three unless `--checkpoint` says
        otherwise. Returns the new one. Raises `CheckpointError` on every rank when it could not be
        written whole; earlier checkpoints are then untouched.

        In the `background` it returns as soon as the state is copied to the memory of the ranks
        that write, and training goes on while they do; the checkpoint is there a little later. At
        most one is under way: a further save waits for it. What goes wrong is raised by the next
        `save`, `load` or `wait_for_save`, or else at the end of the run.
        """
        return self._saving.save(path, keep, state, background=background)

    def wait_for_save(self) -> Path | str | None:
        """*Together.* Waits for the save in the background; returns it, or None if there is none.

        Raises `CheckpointError` on every rank when it could not be written whole.
        """
        return self._saving.wait_for_save()

    def load(self, path: str | Path | None = None) -> dict[str, Any] | None:
        """*Together.* Goes on from a checkpoint, or from the newest in a folder of them.

        Call it after `distribute`. Returns the `state` that was given to `save`. Without `path`
        it looks in this run's own folder and returns None when there is nothing to resume; that
        folder is locked then, because this run goes on there. A checkpoint that is damaged, or that
        was saved when training had diverged, is refused with a `CheckpointError` that names the
        last good one; with `--fallback` that one is taken. Nothing is changed before everything was
        checked, on all ranks.
        """
        return self._saving.load(path)

    def checkpoint_state(self, state: Callable[[], Mapping[str, Any]]) -> None:
        """What automatic checkpoints store beside the run's own state.

        `state` is called at each of them, and returns what one would pass to `save`: the state of a
        learning-rate scheduler, say. `load` returns it.
        """
        self._saving.script_state = state

    def save_when_stopped(
        self,
        path: str | Path | None = None,
        *,
        keep: int | None = None,
        state: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        """*Together.* From now on SIGTERM and SIGUSR1 save once more before the script leaves.

        Call it after `distribute` or `trainer`, once. Whichever rank gets the signal, all ranks
        save together at the end of the same step, into `path` as `save` does, with what `state`
        returns then, or what was given to `checkpoint_state`; and leave with 143 (SIGTERM) or 138
        (SIGUSR1). It needs batches from `run.loader`; a script that reads its data by other means
        calls `end_step` in its loop.
        An evaluation is not interrupted.

        SIGTERM leaves as much time as `farandole run --grace` says (30 seconds); a save that has
        not ended by then is given up, and the newest checkpoint stays. A second SIGTERM, two
        seconds or more after the first, ends the process at once.
        """
        self._saving.save_when_stopped(path, keep, state)

    def end_step(self) -> None:
        """*Together.* The end of a step, for loops over data that do not come from `run.loader`.

        Saves if an automatic checkpoint is due, and saves and leaves if any rank was told to stop;
        see `save_when_stopped`.
        """
        if self._passes.preemption is None and self._passes.automatic is None:
            raise UserError(
                "run.end_step() has nothing to do: call run.save_when_stopped() first, or have "
                "checkpoints saved with --checkpoint or fd.init(checkpoints=…)."
            )
        if not len(self._loaders):  # else they count the steps
            self._session.progress.steps += 1
        self._passes.end_step()

    # The end

    def close(self) -> None:
        """Writes the end of the metrics. Called at the end of the script; waits for no other rank,
        but for a save in the background. Raises `CheckpointError` if that has failed.
        """
        session = self._session
        self._passes.close()
        if self._passes.preemption is not None:
            self._passes.preemption.close()
        if self._passes.automatic is not None:
            self._passes.automatic.close()
            if len(session.models) and not self._passes.automatic.has_begun:
                self.print(
                    "note: no checkpoint was saved: no training batch came from run.loader. Call "
                    "run.end_step() after each step."
                )
        if session.bar is not None:
            session.bar.end()
        session.models.close()
        self._choices.close()
        trained = len(session.models) and self._metrics.has_begun
        dealt = len(self._loaders) > 0 or session.reads_elsewhere
        if trained and not dealt and self.size > 1:
            self.print(
                "note: no batch came from run.loader, so every rank saw what it loaded itself"
            )
        self._metrics.close()
        try:
            self._saving.close()
        finally:
            if self._claim is not None:
                self._claim.release()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

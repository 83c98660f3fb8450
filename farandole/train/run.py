"""`Run`: what a script holds. Layout, sync and data meet here, and nowhere else."""

from __future__ import annotations

import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

import farandole
from farandole.comm import Group
from farandole.comm.activity import NO_ACTIVITY
from farandole.data import BatchInfo, Loader, LoaderOptions, Loaders, Request, Shares
from farandole.environment import STARTED
from farandole.errors import UserError
from farandole.layout import Layout
from farandole.layout.objective import LossFunction, LossWeight
from farandole.report.metrics import MetricsLog
from farandole.sync import AllReduce, InStep, Strategy, Synchronizer, in_step
from farandole.sync.common.alignment import require_in_step
from farandole.sync.common.finite_models import require_finite
from farandole.sync.common.wrappers import refuse_wrapped, refuse_wrapper_around
from farandole.topology import Topology
from farandole.trace.spans import NO_TRACE
from farandole.train.checkpoint import checkpoint
from farandole.train.checkpoint.background_save import BackgroundSaves
from farandole.train.checkpoint.resume import RunState
from farandole.train.checkpoint.save_folder import SaveFolders
from farandole.train.checkpoint.saver import Saver, WholeSaver
from farandole.train.claim import Claim, claim
from farandole.train.compiling import NOTE, is_compiled
from farandole.train.engines.recipe import MakeOptimizer, Recipe
from farandole.train.numbers import T, double, like, plain, short
from farandole.train.progress import EpochProgress
from farandole.train.settings import (
    Settings,
    check_name,
    check_writable,
    default_name,
    read_layout,
    unwritable,
)
from farandole.train.spans import Watch, WatchedLoader
from farandole.train.stopping.preemption import Preemption
from farandole.train.trainer import Trainer
from farandole.worker.environment import hide_seat
from farandole.worker.grace import grace_seconds
from farandole.worker.saving import record_saving


class Run:
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
    ) -> None:
        self.group = group
        self.topology = topology
        self.device = device
        self.seed = seed
        self.settings = settings
        self.fallback = settings.fallback or fallback  # from a damaged checkpoint to a good one
        place = settings.folder or folder
        chosen = settings.name or name
        self._claim: Claim | None = None  # of a folder that nobody named
        if chosen is None:
            chosen = default_name(settings.script or "run")
            if group.rank == 0:
                self._claim = claim(place, chosen)
                chosen = self._claim.name
        self.name = group.broadcast_json(check_name(chosen))
        self.folder = place / self.name
        self.samples = 0  # trained on so far, by all ranks together
        self.steps = 0
        self.epoch = 0
        self.resumed = False
        self._synchronizers: list[Synchronizer] = []
        self._savers: list[Saver] = []
        self._strategy: Strategy = settings.sync or AllReduce()
        self._layout: Layout | None = None  # None: the whole model on every rank
        self._replicas = group  # those who share the data: one rank of every replica, this one's
        self._loaders = Loaders()
        self._leading: Loader | None = None  # the pass over training data that others lie within
        self._preemption: Preemption | None = None
        self._optimizers: list[Optimizer] = []  # that the script itself steps
        self._loader_states: list[dict[str, Any]] = []
        self._epoch_under_way = False
        self._cut: Shares | None = None  # that the last training batch came from, if it is known
        self._reads_shared = False  # the batch under way has samples that other ranks read too
        self._told_of_shared = False
        self._pass_ended = False  # a pass over training data, in this epoch
        self._broken_off = False  # the last one was left before its end
        self._checks_in_step = check_in_step
        told = settings.check_finite
        self._checks_finite = check_finite if told is None else told
        self._total_epochs: int | None = None
        self._notes: list[tuple[dict[str, float], dict[str, float | str]]] = []
        self._save_folders = SaveFolders()
        self._background = BackgroundSaves()
        self._metrics: MetricsLog | None = None
        self._progress = EpochProgress() if group.rank == 0 else None
        self._watch = Watch(group.trace) if group.trace is not NO_TRACE else None
        group.meter.go_on_from(waited_seconds=0.0, bytes_sent=0)  # from here on, like the clock
        self._began = time.perf_counter()
        started = os.environ.get(STARTED)
        self._startup_seconds = time.monotonic() - float(started) if started else None

    # Who am I?

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

    @property
    def seconds(self) -> float:
        """Since the run began; a resumed run goes on where the saved one stopped."""
        return time.perf_counter() - self._began

    def hide_from_libraries(self) -> None:
        """Removes the launcher's variables (`RANK`, `WORLD_SIZE`, …) from this process.

        Libraries that would start a distributed scheme of their own where they find them, such as
        Accelerate and Hugging Face's Trainer, then take this process for one that is alone.
        """
        hide_seat(os.environ)

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
        if self.rank == 0:
            check_writable(self.folder)
        if any(known.model is model for known in self._synchronizers):
            raise UserError("this model is distributed already; call run.distribute once for it.")
        if self.settings.layout not in (None, Layout()):
            raise UserError(
                f"--layout {self.settings.layout} cuts the model, and this script calls it whole. "
                "Let Farandole own the step: run.trainer(model, loss, make_optimizer)."
            )
        refuse_wrapped(model)
        if is_compiled(model):
            self.print(NOTE)
        model = model.to(self.device)
        if optimizer is not None:
            _move_state(optimizer, self.device)
            self._optimizers.append(optimizer)
        self._strategy = self.settings.sync or sync or AllReduce()
        synchronizer = self._strategy.build(model, optimizer, self.group)
        self._keep(synchronizer, WholeSaver(synchronizer, optimizer, writes=self.rank == 0))
        if self.size > 1:
            refuse_wrapper_around(synchronizer.model)
        if self._watch is not None:
            self._watch.follow(synchronizer.model, optimizer)
        activity = self.group.meter.activity
        if optimizer is not None and activity is not NO_ACTIVITY:
            optimizer.register_step_post_hook(lambda *_: activity.step())
        if optimizer is None:
            return synchronizer.model
        return synchronizer.model, optimizer

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
            model,
            Recipe(loss, make_optimizer, clip, precision, loss_weight),
            layout=None if chosen == Layout() else chosen,
            sync=sync,
            sample=sample,
            check=check,
        )

    def _keep(self, synchronizer: Synchronizer, saver: Saver) -> None:
        synchronizer.check_finite(self._checks_finite)
        if synchronizer.guard is not None:
            synchronizer.guard.count = synchronizer.guard.count or (lambda: self.steps)
        self._synchronizers.append(synchronizer)
        self._savers.append(saver)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The plain model. `distribute` puts nothing around it, so that is the model itself."""
        return self._synchronizer(model).model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, backward passes accumulate gradients without communication."""
        return self._synchronizer(model).no_sync()

    def check_in_step(self, model: nn.Module) -> InStep:
        """*Together.* Whether all ranks hold the same bytes; falsy, with names, when not."""
        self._settle()
        return in_step(model, self._replicas)

    def _synchronizer(self, model: nn.Module) -> Synchronizer:
        for known in self._synchronizers:
            if known.model is model:
                return known
        raise UserError("this model was not given to run.distribute.")

    # Data

    def loader(
        self,
        source: Dataset[Any] | DataLoader[Any],
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        shuffle: bool | None = None,
        drop_last: bool = False,
        **torch_options: Any,
    ) -> Loader:
        """*Together.* This rank's share of `source`, on this rank's device.

        A dataset is shuffled unless `shuffle` is False; a DataLoader as it was told to be.

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
        }
        given = {name: value for name, value in ours.items() if value is not None}
        request = Request(
            source,
            {**given, **torch_options},
            training=torch.is_grad_enabled(),
            run_epoch=self.epoch if self._epoch_under_way else None,
        )
        known = self._loaders.find(request)
        if known is not None:
            return known
        options = LoaderOptions(batch_size, global_batch_size, shuffle, drop_last, self.seed)
        return self._new_loader(request, options, torch_options)

    def _new_loader(
        self, request: Request, options: LoaderOptions, torch_options: dict[str, Any]
    ) -> Loader:
        followed = self._loaders.position(request)
        loader = (Loader if self._watch is None else WatchedLoader)(
            request.source,
            options,
            group=self._replicas,
            device=self.device,
            position=followed,
            on_batch=lambda info: self._count(loader, info),
            on_begin=self._begin_pass,
            on_end=lambda finished: self._end_of_pass(loader, finished),
            on_pause=lambda within: self._pause(loader, within),
            **torch_options,
        )
        loader.process_start.outlives_stop_signals = self._preemption is not None
        if followed is None:
            loader.epoch = self._loaders.first_epoch(request)
            if self.group.transport.joined_late:
                loader.epoch = self.epoch
            if len(self._loaders) < len(self._loader_states):
                loader.load_state_dict(self._loader_states[len(self._loaders)])
        self._loaders.add(request, loader)
        if loader.shares is not None and loader.shares.dropped:
            self.print(f"drop_last leaves out {loader.shares.dropped} samples in each epoch")
        return loader

    def epochs(self, count: int) -> Iterator[int]:
        """`range(count)`, except that a resumed run starts where it stopped."""
        if self.resumed and self.epoch >= count:
            self.print(f"{self.name}: all {count} epochs are done already")
        self._total_epochs = count
        while (epoch := self.group.transport.begin_epoch(min(self.epoch, count))) < count:
            self.epoch = epoch
            self._epoch_under_way, self._pass_ended = True, False
            yield epoch
            self.epoch = epoch + 1
            self._epoch_under_way = False

    def _count(self, loader: Loader, info: BatchInfo) -> None:
        """Runs for every batch. What is drawn without gradients is evaluation, not training."""
        self.group.meter.activity.step()
        if torch.is_grad_enabled():
            if self.steps == 0 and self.size > 1 and not self._synchronizers:
                self.print(
                    "note: no model was given to run.distribute, so each rank trains one of its "
                    "own. Write `model, opt = run.distribute(model, opt)` before the loop."
                )
            self.samples += info.samples
            self.steps += 1
            progress = self._share_done(info)
            for synchronizer in self._synchronizers:
                synchronizer.share_samples(info.readers)
                synchronizer.begin_step(info.weight, progress, info.own_samples)
            self._collect_notes()
            self._cut = loader.shares
            self._reads_shared = info.readers > 1
            if self._synchronizers and not any(s.model.training for s in self._synchronizers):
                self._tell_of_shared_samples()
        if self._progress is not None:
            self._progress.batch(loader.epoch, info)

    def _tell_of_shared_samples(self) -> None:
        """Once, where a script evaluates and counts samples that several ranks have read."""
        if self._reads_shared and not self._told_of_shared and torch.is_grad_enabled():
            self._told_of_shared = True
            self.print(
                "note: a pass that is read with gradients enabled counts as training, and several "
                "workers read the same samples in its last step: a script that counts them here "
                "counts them several times. To evaluate, put the loop over the loader under "
                "torch.no_grad()."
            )

    def _share_done(self, info: BatchInfo) -> float | None:
        """How much of the run lies behind, if anybody knows how long it is."""
        if not self._total_epochs or not info.steps or not self._epoch_under_way:
            return None
        return (self.epoch + info.step / info.steps) / self._total_epochs

    def _begin_pass(self, fresh: bool) -> None:
        self._settle()
        if torch.is_grad_enabled() and fresh:
            for synchronizer in self._synchronizers:
                synchronizer.begin_pass()

    def _pause(self, loader: Loader, within: bool) -> None:
        """Between two steps, or before the first of a pass: here a run can be saved and stopped.

        Not in the middle of an evaluation, nor where one pass over training data lies within
        another, whose step is not over.
        """
        if self._preemption is None or not torch.is_grad_enabled():
            return
        if self._leading in (None, loader):
            self._preemption.between_steps(within_pass=within)
            self._leading = loader

    def _end_of_pass(self, loader: Loader, finished: bool) -> None:
        if self._leading is loader:
            self._leading = None
        # Evaluation in the middle of a training pass must not change that pass's weights.
        if torch.is_grad_enabled():
            self._reads_shared = False
            self._pass_ended = True
            # A loop that was broken off may have been so by an error: no time to talk to others.
            self._broken_off = True
            if finished:
                self._settle()
        if self._progress is not None:
            self._progress.end()

    def _settle(self) -> None:
        """*Together.* Ends the last pass over training data, if it has not been ended yet."""
        if not self._broken_off:
            return
        self._broken_off = False
        for synchronizer in self._synchronizers:
            synchronizer.end_pass()
        self._settle_guards()
        self._collect_notes()
        if self._checks_finite:
            require_finite([known.model for known in self._synchronizers], self.group, self.steps)
        if self._checks_in_step and self._replicas.size > 1:
            for synchronizer in self._synchronizers:
                if synchronizer.in_step_after_pass:
                    when = f"after {self.steps} steps"
                    require_in_step(synchronizer.model, self._replicas, when)

    def _settle_guards(self) -> None:
        """*Together.* What a GPU has found out about the last gradients is acted on."""
        for synchronizer in self._synchronizers:
            if synchronizer.guard is not None:
                synchronizer.guard.settle()

    def observe_loss(self, loss: float | torch.Tensor) -> None:
        """Tells the strategies the loss of this rank's batch: AdaComm and DASO steer by it.

        Costs next to nothing; a loss that is on a GPU is not waited for. Scripts that do not call
        it are steered by what they `log` as `loss`.
        """
        for synchronizer in self._synchronizers:
            synchronizer.observe_loss(loss)

    def _collect_notes(self) -> None:
        """Takes what strategies have decided, with the time; it is written with the next log."""
        for synchronizer in self._synchronizers:
            if self.rank == 0 and synchronizer.notes:
                counters = self._counters()
                self._notes += [(counters, note) for note in synchronizer.notes]
            synchronizer.notes.clear()

    # Numbers

    def mean(self, value: T, weight: float = 1.0) -> T:
        """*Together.* The mean of `value` over all ranks, each counted `weight` times."""
        self._settle()
        total = self.group.all_reduce(double(value) * float(weight))
        return like(value, total / self.sum(float(weight)))

    def sum(self, value: T) -> T:
        """*Together.* The sum of `value` over all ranks; as in torch, integers add up to int64."""
        self._settle()
        if isinstance(value, torch.Tensor) and not value.is_floating_point():
            return self.group.all_reduce(value.detach().to(torch.int64, copy=True))
        return like(value, self.group.all_reduce(double(value)))

    def log(self, **metrics: float | torch.Tensor | str) -> None:
        """Writes to `runs/<name>/metrics.jsonl` and TensorBoard, and prints a line. Rank 0 only.

        The other ranks' calls do nothing: pass what `mean` and `sum` return.
        """
        self.group.meter.activity.step()
        if self.rank != 0:
            return
        logged = {name: plain(name, value) for name, value in metrics.items()}
        if isinstance(logged.get("loss"), (int, float)):
            for synchronizer in self._synchronizers:
                synchronizer.hear(float(logged["loss"]))
        counters = self._counters()
        try:
            self._write_notes(self._open_metrics())
            self._open_metrics().log(counters, logged)
        except OSError as error:
            raise unwritable(self.folder, error) from error
        shown = "  ".join(f"{name} {short(value)}" for name, value in logged.items())
        waited = counters["waited_seconds"] / max(counters["time"], 1e-9)
        self.print(f"{shown}  ·  {counters['time']:.1f} s, {waited:.0%} waiting")

    def _write_notes(self, metrics: MetricsLog) -> None:
        self._collect_notes()
        for counters, note in self._notes:
            metrics.note(counters, note)
        self._notes.clear()

    def print(self, *values: object) -> None:
        """Prints on rank 0, above the progress bar if there is one."""
        if self._progress is not None:
            self._progress.print(" ".join(map(str, values)))

    def _counters(self) -> dict[str, float]:
        return {
            "time": self.seconds,
            "samples": self.samples,
            "steps": self.steps,
            "waited_seconds": self.group.meter.waited_seconds,
            "bytes_sent": self.group.meter.bytes_sent,
        }

    def _open_metrics(self) -> MetricsLog:
        if self._metrics is None:
            start = {
                "name": self.name,
                "sync": str(self._strategy),
                **({} if self._layout is None else {"layout": str(self._layout)}),
                "size": self.size,
                "hosts": len(self.topology.hosts),
                "device": str(self.device),
                "script": self.settings.script,
                "startup_seconds": self._startup_seconds,
                "seed": self.seed,
                "versions": versions(),
            }
            self._metrics = MetricsLog(self.folder, start, resumed=self.resumed)
        return self._metrics

    # Checkpoints

    def save(
        self,
        path: str | Path | None = None,
        *,
        keep: int = 3,
        background: bool = False,
        **state: Any,
    ) -> Path:
        """*Together.* Saves everything needed to go on: models, optimizers, strategy, epoch,
        positions of the loaders, random state, and `state` of your own (numbers, tensors, dicts).

        `path` is a folder that holds checkpoints, `runs/<name>/checkpoints` by default; the
        newest `keep` stay. Returns the new one. Raises `CheckpointError` on every rank when it
        could not be written whole; earlier checkpoints are then untouched.

        In the `background` it returns as soon as the state is copied to the memory of the ranks
        that write, and training goes on while they do; the checkpoint is there a little later. At
        most one is under way: a further save waits for it. What goes wrong is raised by the next
        `save`, `load` or `wait_for_save`, or else at the end of the run.
        """
        folder = Path(path) if path else self.folder / "checkpoints"
        self._settle()
        self._settle_guards()
        with self.group.trace.span("save", "checkpoint"):
            self.wait_for_save()
            return self._state().save(folder, state, keep, background=background)

    def wait_for_save(self) -> Path | None:
        """*Together.* Waits for the save in the background; returns it, or None if there is none.

        Raises `CheckpointError` on every rank when it could not be written whole.
        """
        return self._background.finish_together(self.group)

    def load(self, path: str | Path | None = None) -> dict[str, Any] | None:
        """*Together.* Goes on from a checkpoint, or from the newest in a folder of them.

        Call it after `distribute`. Returns the `state` that was given to `save`. Without `path`
        it looks in this run's own folder and returns None when there is nothing to resume; that
        folder is locked then, because this run goes on there. A checkpoint that is damaged, or that
        was saved when training had diverged, is refused with a `CheckpointError` that names the
        last good one; with `--fallback` that one is taken. Nothing is changed before everything was
        checked, on all ranks.
        """
        folder = Path(path) if path else self.folder / "checkpoints"
        with self.group.trace.span("load", "checkpoint"):
            self.wait_for_save()
            return self._state().load(folder, missing_ok=path is None)

    def save_when_stopped(
        self,
        path: str | Path | None = None,
        *,
        keep: int = 3,
        state: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """*Together.* From now on SIGTERM and SIGUSR1 save once more before the script leaves.

        Call it after `distribute` or `trainer`, once. Whichever rank gets the signal, all ranks
        save together at the end of the same step, into `path` as `save` does, with what `state`
        returns then; and leave with 143 (SIGTERM) or 138 (SIGUSR1). It needs batches from
        `run.loader`; a script that reads its data by other means calls `stop_if_told` in its loop.
        An evaluation is not interrupted.

        SIGTERM leaves as much time as `farandole run --grace` says (30 seconds); a save that has
        not ended by then is given up, and the newest checkpoint stays. A second SIGTERM, two
        seconds or more after the first, ends the process at once.
        """
        if not self._synchronizers:
            raise UserError("call run.save_when_stopped() after run.distribute or run.trainer.")
        if self._preemption is not None:
            raise UserError("run.save_when_stopped() was called before; once is enough.")
        folder = Path(path) if path else self.folder / "checkpoints"
        self._preemption = Preemption(
            self.group,
            lambda: self.save(folder, keep=keep, **state()),
            newest=lambda: checkpoint.newest(folder),
            say=self.print,
            optimizers=self._optimizers,
            grace_seconds=grace_seconds(os.environ),
        )
        record_saving()
        for loader in self._loaders:
            loader.process_start.outlives_stop_signals = True

    def stop_if_told(self) -> None:
        """*Together.* Saves and leaves if any rank was told to stop; see `save_when_stopped`.

        For loops over data that do not come from `run.loader`: call it after every step.
        """
        if self._preemption is None:
            raise UserError("call run.save_when_stopped() first: it says what to save, and where.")
        self._preemption.between_steps()

    def _state(self) -> RunState:
        return RunState(self)

    # The end

    def close(self) -> None:
        """Writes the end of the metrics. Called at the end of the script; waits for no other rank,
        but for a save in the background. Raises `CheckpointError` if that has failed.
        """
        if self._preemption is not None:
            self._preemption.close()
        if self._progress is not None:
            self._progress.end()
        for synchronizer in self._synchronizers:
            synchronizer.close()
        if self._synchronizers and not self._loaders and self.size > 1 and self._metrics:
            self.print(
                "note: no batch came from run.loader, so every rank saw what it loaded itself"
            )
        if self._metrics is not None:
            try:
                self._write_notes(self._metrics)
                self._metrics.close(self._counters())
            except OSError as error:  # must not hide the error that ended the script
                warnings.warn(f"the end of {self.folder} is not written: {error}", stacklevel=2)
        try:
            self._background.finish_alone()
        finally:
            self._save_folders.release()
            if self._claim is not None:
                self._claim.release()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def versions() -> dict[str, str]:
    return {
        "farandole": farandole.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _move_state(optimizer: Optimizer, device: torch.device) -> None:
    """State that was made before its parameters moved follows them."""
    for state in optimizer.state.values():
        for key, value in state.items():
            # Adam's step counter stays on the CPU unless it was made for the GPU.
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                state[key] = value.to(device)

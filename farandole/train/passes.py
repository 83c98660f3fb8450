"""What happens around every pass over data and every batch of it.

    begin ── pause ── batch ── pause ── batch … ── end        training: all of it
    begin ─────────── batch ─────────── batch … ── end        evaluation: batches are shown, no more

Ending a pass is a collective. A pass that a script breaks off is therefore not ended at once: the
break may have come from an error on this rank alone. It is ended when the ranks meet next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

from farandole.data import BatchInfo, Loader
from farandole.data.skipped_samples import SkippedSamples
from farandole.errors import UserError
from farandole.sync import AllReduce
from farandole.train.checkpoint.automatic.saves import AutomaticSaves
from farandole.train.elastic.support import refuse, require_elastic_loader
from farandole.train.elastic.training import ElasticTraining
from farandole.train.run_metrics import RunMetrics
from farandole.train.run_parts.hints import Hints
from farandole.train.session import Session
from farandole.train.stopping.preemption import Preemption
from farandole.worker.gpu_memory import gather_peaks
from farandole.worker.trial.clock import trial_clock


class Passes:
    """Called by the loaders of a run. Counts steps, and calls the strategies around them."""

    def __init__(self, session: Session, metrics: RunMetrics) -> None:
        self._session = session
        self._metrics = metrics
        self.preemption: Preemption | None = None
        self.automatic: AutomaticSaves | None = None
        self.elastic: ElasticTraining | None = None
        self._trial = trial_clock(session.rank, session.device)
        self._leading: Loader | None = None  # the training pass that others lie within
        self._unsettled = False  # the last training pass was left, and the ranks have not met
        self._reads_shared = False  # the batch under way has samples that other ranks read too
        self.skipped = SkippedSamples()
        self._hints = Hints(session)
        self.waits: list[Callable[[], None]] = []
        """Called before the ranks meet: for what other frameworks compute in the background."""

    def begin(self, loader: Loader, *, fresh: bool) -> None:
        self.settle()
        if loader.is_training and fresh:
            self._session.models.begin_pass()

    def pause(self, loader: Loader, *, within: bool) -> None:
        """Between two steps, or before the first of a pass: here a run can be saved and stopped.

        Not in the middle of an evaluation, nor where one pass over training data lies within
        another, whose step is not over.
        """
        if not loader.is_training or self._leading not in (None, loader):
            return
        if self.elastic is not None:
            self.elastic.between_steps()
            self._leading = loader
        if self.preemption is not None or self.automatic is not None:
            survivors = self._session.survivors
            if survivors is not None:
                survivors.between_steps()
            with nullcontext() if survivors is None else survivors.left_on_loss():
                self.end_step(within_pass=within)
            self._leading = loader

    def end_step(self, *, within_pass: bool = True) -> None:
        """*Together.* Saves if that is due, and leaves if the run was told to."""
        if self.preemption is not None:
            self.preemption.between_steps(within_pass=within_pass)
        if self.automatic is not None:
            self.automatic.between_steps(within_pass=within_pass)

    def batch(self, loader: Loader, info: BatchInfo) -> None:
        session = self._session
        if loader.is_training:
            self._check_elastic(loader)
            if loader.options.shares == "speed":
                self._check_shares()
            self.skipped.may_happen |= loader.skips
            self.train_batch(info)
            session.cut = loader.shares
            self._reads_shared = info.readers > 1
            if session.models.are_evaluated:
                self.warn_of_shared_samples()
        else:
            session.group.meter.activity.step()
        if session.bar is not None:
            session.bar.batch(loader.epoch, info)

    def train_batch(self, info: BatchInfo) -> None:
        """Counts a step, and tells the strategies of it."""
        session = self._session
        session.group.meter.activity.step()
        if session.progress.steps == 0 and session.size > 1 and not session.keeps_in_step:
            session.print(
                "note: no model was given to run.distribute, so each rank trains one of its "
                "own. Write `model, opt = run.distribute(model, opt)` before the loop."
            )
        if self._trial is not None:
            self._trial.batch(info.samples)
        session.progress.count(info)
        session.batch_weight = info.weight
        if session.reporter is not None:
            session.reporter.progress(session.progress.steps, session.progress.epoch)
        session.models.begin_step(info, session.progress.share_done(info))
        self._metrics.collect_notes()

    def end_training_pass(self) -> None:
        """*Together.* A pass was read to its end, on all ranks."""
        self._session.progress.pass_ended = True
        self._unsettled = True
        self.settle()

    def _check_elastic(self, loader: Loader) -> None:
        if self.elastic is None:
            return
        if not self._session.progress.epoch_under_way:
            raise refuse("a loop over epochs of the script's own; write `for e in run.epochs(n)`:")
        assert self._session.most_workers is not None
        require_elastic_loader(loader, self._session.most_workers)
        self.elastic.end_setup()

    def _check_shares(self) -> None:
        session = self._session
        if session.most_workers is not None:
            raise refuse("shares='speed', which counts on the same workers throughout,")
        if session.layout is not None:
            raise UserError(
                f"shares='speed' with layout {session.layout}: the workers of a replica wait for "
                "each other within a step, so that none has a speed of its own. Leave one out."
            )
        if len(session.models) and not isinstance(session.strategy, AllReduce):
            raise UserError(
                f"shares='speed' with --sync {session.strategy}: samples of a step count alike "
                "only where gradients are averaged in every step. Take --sync allreduce, or leave "
                "out shares='speed'."
            )

    def share(self, quotas: Sequence[int], speeds: Sequence[float]) -> None:
        """The workers have agreed on other shares: for the report."""
        shown = " ".join(map(str, quotas))
        measured = " ".join(f"{speed:.4g}" for speed in speeds)
        self._session.print(f"shares of a step by speed: {shown} samples")
        self._metrics.add_note({"shares": shown, "samples_per_second": measured})

    def end(self, loader: Loader, *, finished: bool) -> None:
        if self._leading is loader:
            self._leading = None
        if finished and not loader.is_training:
            self._hints.evaluations += 1
        # Evaluation in the middle of a training pass must not change that pass's weights.
        if loader.is_training:
            if self._trial is not None:
                self._trial.end_pass()
            self._session.progress.pass_ended = True
            self._unsettled = True
            # A pass that was read to its end has ended on all ranks: all have as many steps.
            if finished:
                self.settle()
        if self._session.bar is not None:
            self._session.bar.end()

    def settle(self) -> None:
        """*Together.* Ends the last pass over training data, if it has not been ended yet."""
        for wait in self.waits:
            wait()
        if not self._unsettled:
            return
        self._unsettled = False
        session = self._session
        session.batch_weight = 1.0
        session.models.end_pass()
        self._metrics.collect_notes()
        if self.skipped.may_happen:
            self._report_skipped()
        session.models.check_after_pass(session.group, session.replicas)
        self._hints.after_pass()
        peaks = gather_peaks(session.group, session.device)
        if peaks is not None:
            self._metrics.gpu_peaks = peaks

    def close(self) -> None:
        """The run is over."""
        if self._trial is not None:
            self._trial.close()

    def _report_skipped(self) -> None:
        """*Together.* Adds to the report how many samples of the pass all ranks have left out."""
        count = self.skipped.total(self._session.replicas)
        if count and self._session.rank == 0:
            self._session.print(
                f"note: {count} samples of this pass could not be decoded, and were left out"
            )
            self._metrics.notes.append((self._session.counters(), {"skipped_samples": count}))

    def warn_of_shared_samples(self) -> None:
        """Warns once, where a script evaluates and counts samples that several ranks have read."""
        if self._reads_shared:
            self._hints.tell_of_shared_samples()

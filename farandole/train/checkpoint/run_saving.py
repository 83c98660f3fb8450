"""How a run saves and resumes: what the script asks for, what is due by itself, what a signal asks.

`RunCheckpoints` writes and reads; here is decided when, and with which state of the script's own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from farandole.environment import ATTEMPT
from farandole.errors import CheckpointError, UserError
from farandole.train.checkpoint.automatic.elastic_saves import ElasticSaves
from farandole.train.checkpoint.automatic.policy import Checkpoints
from farandole.train.checkpoint.automatic.saves import AutomaticSaves, Saving
from farandole.train.checkpoint.automatic.schedulers import has_scheduler
from farandole.train.checkpoint.resume import RunCheckpoints
from farandole.train.checkpoint.saving import RanksChangedError
from farandole.train.checkpoint.survivors.leaving import SurvivorSaves
from farandole.train.choosing.hyperparameters import kept_hyperparameters
from farandole.train.elastic.support import refuse
from farandole.train.elastic.training import ElasticTraining
from farandole.train.loaders import RunLoaders
from farandole.train.passes import Passes
from farandole.train.run_metrics import RunMetrics
from farandole.train.session import Session
from farandole.train.stopping.preemption import Preemption
from farandole.urls import is_url
from farandole.worker.grace import grace_seconds
from farandole.worker.marker_files import record_saving

ScriptState = Callable[[], Mapping[str, Any]]


class RunSaving:
    """All methods are *together*. The methods of `Run` of the same names say what they do."""

    def __init__(
        self,
        session: Session,
        loaders: RunLoaders,
        metrics: RunMetrics,
        passes: Passes,
        policy: Checkpoints | None,
        elastic: ElasticTraining | None,
        *,
        fallback: bool,
    ) -> None:
        self._session = session
        self._loaders = loaders
        self._passes = passes
        self._elastic = elastic
        self.script_state: ScriptState | None = None
        self._has_loaded = False  # or looked for something to load
        self._has_told = False  # that an optimizer is not saved
        self._checkpoints = RunCheckpoints(session, loaders, metrics, policy, fallback=fallback)
        if elastic is not None and elastic.life:
            self._checkpoints.succeed()
        if policy is None:
            return
        if elastic is not None and is_url(policy.to):
            raise refuse(f"saving to {policy.to}, an object store,")
        passes.automatic = self._automatic(policy)
        session.survivors = self._survivors()
        metrics.on_log = passes.automatic.logged

    def _automatic(self, policy: Checkpoints) -> AutomaticSaves:
        checkpoints, elastic = self._checkpoints, self._elastic
        if elastic is not None:
            return ElasticSaves(
                self._session,
                policy,
                Saving(
                    prepare=lambda: elastic.unrecorded(checkpoints.take_over),
                    begin=lambda: elastic.unrecorded(self._save_by_itself),
                    finish=checkpoints.wait_for_save,
                    write_seconds=lambda: checkpoints.write_seconds,
                ),
                elastic,
                has_state=lambda: self.script_state is not None,
            )
        return AutomaticSaves(
            self._session,
            policy,
            Saving(
                prepare=checkpoints.take_over,
                begin=lambda: self.save(None, None, self._own_state(), background=True),
                finish=checkpoints.wait_for_save,
                write_seconds=lambda: checkpoints.write_seconds,
            ),
            has_state=lambda: self.script_state is not None,
        )

    def _survivors(self) -> SurvivorSaves | None:
        """Where all workers start again when one is lost."""
        attempt, folder = os.environ.get(ATTEMPT), self._checkpoints.folder
        if not attempt or folder is None or self._elastic is not None:
            return None
        return SurvivorSaves(
            self._session,
            folder,
            int(attempt),
            self._checkpoints.run_part,
            self._own_state,
        )

    def save(
        self,
        path: str | Path | None,
        keep: int | None,
        state: Mapping[str, Any],
        *,
        background: bool,
    ) -> Path | str:
        self._passes.settle()
        self._session.models.settle_guards()
        self._tell_what_is_left_out(state)
        with self._session.group.trace.span("save", "checkpoint"):
            self._checkpoints.wait_for_save()

            if self._elastic is not None:
                saved = self._save_elastic(self._elastic, path, keep, state)
            else:
                saved = self._checkpoints.save(path, dict(state), keep, background=background)
        if self._passes.automatic is not None:
            self._passes.automatic.saved()
        return saved

    def _save_elastic(
        self,
        elastic: ElasticTraining,
        path: str | Path | None,
        keep: int | None,
        state: Mapping[str, Any],
    ) -> Path | str:
        """Not in the background: who comes or goes meanwhile would not have the same saves under
        way as the others."""
        if is_url(path):
            raise refuse(f"saving to {path}, an object store,")
        return Path(elastic.as_one(lambda: self._save_through_losses(path, keep, state)))

    def _save_through_losses(
        self, path: str | Path | None, keep: int | None, state: Mapping[str, Any]
    ) -> str:
        while True:
            with contextlib.suppress(RanksChangedError):
                return str(self._checkpoints.save(path, dict(state), keep))

    def _save_by_itself(self) -> str:
        self._passes.settle()
        self._session.models.settle_guards()
        own = self._own_state()
        self._tell_what_is_left_out(own)
        return self._save_through_losses(None, None, own)

    def _tell_what_is_left_out(self, state: Mapping[str, Any]) -> None:
        others = self._session.models.other_optimizers.without_a_place_in(state)
        if others and not self._has_told:
            self._has_told = True
            self._session.print(
                f"note: {' and '.join(others)} trains parameters of a distributed model, was not "
                "given to run.distribute, and is not in the checkpoint. Pass "
                "other=optimizer.state_dict() to run.save, or by run.checkpoint_state, and restore "
                "it from what run.load() returns."
            )

    def wait_for_save(self) -> Path | str | None:
        return self._checkpoints.wait_for_save()

    def load(self, path: str | Path | None) -> dict[str, Any] | None:
        self._has_loaded = True
        with self._session.group.trace.span("load", "checkpoint"):
            self._checkpoints.wait_for_save()

            def load() -> dict[str, Any] | None:
                if not self._session.settings.perturbed:
                    return self._checkpoints.load(path)
                with kept_hyperparameters(saver.optimizer for saver in self._session.models.savers):
                    return self._checkpoints.load(path)

            return load() if self._elastic is None else self._elastic.as_one(load)

    def resume_by_itself(self) -> None:
        """Goes on from the newest automatic checkpoint, for a script that does not call `load`."""
        late = self._session.group.transport.joined_late  # it takes over from the others
        has_begun = self._has_loaded or self._session.progress.steps
        if self._passes.automatic is None or late or has_begun:
            return
        state = self.load(None)
        resumed, scheduled = self._session.progress.resumed, self._has_scheduler()
        if state or (resumed and scheduled):
            raise _must_load("there is a checkpoint to go on from")
        # Not when a worker is lost, after hours of training.
        if ATTEMPT in os.environ and (scheduled or self.script_state is not None):
            raise _must_load("with --restarts the script must go on from its checkpoints")

    def _has_scheduler(self) -> bool:
        return has_scheduler(saver.optimizer for saver in self._session.models.savers)

    def save_when_stopped(
        self, path: str | Path | None, keep: int | None, state: ScriptState | None
    ) -> None:
        session = self._session
        if not len(session.models):
            raise UserError("call run.save_when_stopped() after run.distribute or run.trainer.")
        if self._passes.preemption is not None:
            raise UserError("run.save_when_stopped() was called before; once is enough.")
        self._passes.preemption = Preemption(
            session.group,
            lambda: self._save_last(path, keep, state),
            newest=lambda: self._checkpoints.newest(path),
            say=session.print,
            optimizers=session.optimizers,
            grace_seconds=grace_seconds(os.environ),
            agreement=None if self._elastic is None else self._elastic.stop_agreement(),
        )
        record_saving()
        self._loaders.outlive_stop_signals()

    def _save_last(
        self, path: str | Path | None, keep: int | None, state: ScriptState | None
    ) -> Path | str:
        """What went wrong in the background before must not prevent it."""
        try:
            self.wait_for_save()
        except CheckpointError as error:
            self._session.print(f"warning: {error}")
        own = self._own_state() if state is None else state()
        return self.save(path, keep, own, background=False)

    def _own_state(self) -> Mapping[str, Any]:
        return {} if self.script_state is None else self.script_state()

    def close(self) -> None:
        self._checkpoints.close()


def _must_load(why: str) -> UserError:
    return UserError(
        f"{why}, and the script has state of its own to restore: a learning-rate scheduler, or "
        "what it gave to run.checkpoint_state. Call run.load() after run.distribute, and restore "
        "that from what it returns."
    )

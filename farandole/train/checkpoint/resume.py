"""Saves all that a run needs to go on as if it had never stopped, and restores it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Final

from farandole.errors import CheckpointError, UserError
from farandole.train.checkpoint.automatic.policy import Checkpoints
from farandole.train.checkpoint.background_save import BackgroundSaves
from farandole.train.checkpoint.contents import check_random_state
from farandole.train.checkpoint.fitting_model import require_fitting_model
from farandole.train.checkpoint.places.run_places import Places
from farandole.train.checkpoint.same_optimizer import OtherOptimizer
from farandole.train.checkpoint.saver import State, count_models, merged_parts
from farandole.train.checkpoint.saving import load_together, save_together, take_together
from farandole.train.checkpoint.survivors.joining import join_together
from farandole.train.loaders import RunLoaders
from farandole.train.randomness import random_state, restore_random_state
from farandole.train.run_metrics import RunMetrics
from farandole.train.session import Session
from farandole.train.settings import WHOLE
from farandole.urls import is_url

_LOCK_SECONDS: Final = 60.0

UNFITTING: Final = (
    RuntimeError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    MemoryError,
)
"""What a state that is none can raise in whoever takes it."""


class RunCheckpoints:
    """Gathers a run's state for a checkpoint, and restores it."""

    def __init__(
        self,
        session: Session,
        loaders: RunLoaders,
        metrics: RunMetrics,
        policy: Checkpoints | None,
        *,
        fallback: bool,
    ) -> None:
        self._session = session
        self._loaders = loaders
        self._metrics = metrics
        self._policy = policy or Checkpoints()
        self._fallback = fallback  # from a damaged checkpoint to a good one
        self._places = Places(session.folder, self._policy)
        self._check_place(self._policy.to)
        self._background = BackgroundSaves()

    @property
    def write_seconds(self) -> float | None:
        """How long the last save in the background took; None: it is under way."""
        return self._background.write_seconds

    @property
    def folder(self) -> Path | None:
        """The run's own; None: an object store."""
        return self._places.own_folder

    def newest(self, path: str | Path | None) -> Path | str | None:
        """As far as it is known without asking others: the process may be about to end."""
        return self._places.newest(path)

    def save(
        self,
        path: str | Path | None,
        user_state: dict[str, Any],
        keep: int | None,
        *,
        background: bool = False,
    ) -> Path | str:
        """Saves together with all ranks; see `Run.save`."""
        session = self._session
        self._check_place(path)
        destination = self._places.destination(path, keep)
        if session.is_successor:
            self.succeed()
            destination.succeed()
        # In a thread, rank 0 would wait for the parts of ranks that have died. Where they may, they
        # save together instead: there a dead rank is not waited for.
        background = background and not session.group.transport.may_join_late
        if not session.models.synchronizers:
            session.print("note: this checkpoint holds no model: none was given to run.distribute")
        shared: dict[str, Any] = {"run": self.run_part(), "state": user_state}
        own: dict[str, Any] = {"random": random_state(session.device), "sync": []}
        parts: dict[str, Any] = {}
        # On every rank, also on those that write nothing: finding the one model that replicas stand
        # for is a collective of most strategies. The strategy's state comes after it.
        for index, saver in enumerate(session.models.savers):
            state = saver.state()
            if state is not None:
                model, optimizer = state
                parts[f"model-{index}{saver.suffix}"] = model
                if optimizer is not None:
                    parts[f"optimizer-{index}{saver.suffix}"] = optimizer
            own["sync"].append(session.models.synchronizers[index].state_dict())
        try:
            # What is uploaded is always copied first: the copy is laid out as the file is.
            in_thread = background or destination.is_remote
            saved = save_together(
                session.group,
                destination,
                shared,
                own,
                parts,
                metrics=self._metrics.take_for_checkpoint(),
                background=self._background if in_thread else None,
                on_commit=lambda made: self._report(path, made, shared["run"]),
            )
            return saved if background or not in_thread else self.wait_for_save() or saved
        finally:
            self._tell_notes()

    def run_part(self) -> dict[str, Any]:
        """How far the run has come."""
        session = self._session
        return {
            "samples": session.progress.samples,
            "steps": session.progress.steps,
            "seconds": session.progress.seconds,
            "next_epoch": session.progress.next_epoch(
                loaders=len(self._loaders),
                under_way=any(loader.done_samples for loader in self._loaders),
            ),
            "loaders": [loader.state_dict() for loader in self._loaders],
            "size": session.size,
            "sync": str(session.strategy),
            "layout": str(session.layout),
            "waited_seconds": session.group.meter.waited_seconds,
            "bytes_sent": session.group.meter.bytes_sent,
        }

    def _report(self, path: str | Path | None, checkpoint: Path | str, saved: Any) -> None:
        """Tells the launcher of a checkpoint, with this state of the run in it."""
        if self._session.reporter is not None:
            steps, epoch = saved["steps"], saved["next_epoch"]
            self._session.reporter.has_checkpoint(str(path or ""), str(checkpoint), steps, epoch)

    def _check_place(self, path: str | Path | None) -> None:
        if is_url(path) and self._session.group.transport.may_join_late:
            raise UserError(
                f"{path}: workers under parameter servers may die while a save is uploaded, and it "
                "would wait for them in vain. Save to a folder that all workers see."
            )

    def load(self, path: str | Path | None) -> dict[str, Any] | None:
        """Loads together with all ranks; see `Run.load`."""
        session = self._session
        if path is None:
            self.take_over()
            if session.survivors is not None:
                join_together(session, self._places.destination(None), session.survivors.attempt)
        if session.reporter is not None:
            session.reporter.looked(str(path or ""))
        source = self._places.source(path)
        found = load_together(session.group, source, fallback=self._fallback)
        if found is None and path is None:
            return None
        if found is None:
            raise CheckpointError(f"there is no checkpoint in {source}.")
        name, parts, notes = found
        self._restore(source.label(name), parts, notes)
        if session.rank == 0:
            self._places.went_on_from(path, name)
            self._report(path, source.label(name), parts["run"])
        user_state: dict[str, Any] = parts["state"]
        return user_state

    def _restore(self, source: Path | str, parts: dict[str, Any], notes: list[str]) -> None:
        session = self._session
        for note in notes:
            self._say(note)
        saved, own = parts["run"], parts.get(f"rank-{session.rank}")
        afresh = self._why_afresh(saved, own)
        if afresh is not None:
            own = None
        # All checks on all ranks come before the first change on any of them. A script that catches
        # the error then still has the model that it had.
        self._check_fits(parts, own, source)
        self._load_models(parts, source)
        progress = session.progress
        progress.samples, progress.steps = saved["samples"], saved["steps"]
        progress.go_on_from(saved["seconds"])
        session.group.meter.go_on_from(saved["waited_seconds"], saved["bytes_sent"])
        progress.epoch = saved["next_epoch"]
        progress.resumed = True
        session.print(f"going on from {source}, at epoch {progress.epoch}")
        progress.loader_states = saved["loaders"]
        # Loaders count samples of all ranks together, so their positions mean the same on another
        # number of workers. Those that the script has not asked for yet take theirs when it does.
        for loader, state in zip(self._loaders, saved["loaders"], strict=False):
            loader.load_state_dict(state)
        if afresh is not None:
            self._say(afresh)
        elif own is not None:
            self._load_own(own, source)

    def _why_afresh(self, saved: dict[str, Any], own: Any) -> str | None:
        """*Together.* Why the random state and the strategy's state are not restored, if so."""
        # Both belong to a rank. With other ranks nobody could say whose they are now: two ranks
        # with the same random state would draw the same noise, and a strategy's state of some ranks
        # only (an exchange under way, say) would leave the others out of its collectives. The
        # model, the optimizer, the counts and the positions of the loaders hold on any number.
        session = self._session
        layout = saved.get("layout", "None")
        # A rank may have been dead when this was saved, and then has nothing of its own.
        if saved["size"] != session.size or not all(session.group.gather_json(own is not None)):
            return (
                f"saved on {saved['size']} workers, resumed on {session.size}: random state and "
                "the strategy's own state start afresh"
            )
        if layout != str(session.layout):
            return (
                f"saved with layout {_word(layout)}, resumed with {_word(str(session.layout))}: "
                "random state and the strategy's own state start afresh"
            )
        if saved["sync"] != str(session.strategy):
            return (
                f"saved under {saved['sync']}, resumed under {session.strategy}: the strategy's "
                "own state starts afresh"
            )
        return None

    def succeed(self) -> None:
        """Another worker was rank 0 before. On a host that was cut off it may live a little longer,
        and keep the folder of a file system that both hosts share."""
        # Other ranks wait for this one meanwhile, no longer than their timeout.
        timeout = self._session.group.timeout.total_seconds()
        self._places.wait_for_locks(min(timeout / 2, _LOCK_SECONDS))

    def take_over(self) -> None:
        """*Together.* Locks this run's own folder before it looks for a checkpoint there.

        A job that was started again beside the one that it shall replace is refused now, and not
        when it has trained as far as its first save. A folder that cannot be written to can still
        be loaded from.
        """
        group = self._session.group
        if group.broadcast_json(self._places.may_be_written):
            take_together(group, self._places.destination(None), required=False)
            self._tell_notes()

    def _check_fits(self, parts: dict[str, Any], own: Any, source: Path | str) -> None:
        """*Together.* Raises `CheckpointError` on all ranks if the checkpoint does not fit on one.

        Changes nothing. Of a model in stages, one rank's part may fit and another's not.
        """
        session = self._session
        saved = count_models(parts)
        if saved != len(session.models.savers):
            raise CheckpointError(
                f"the checkpoint holds {saved} model(s), this run has distributed "
                f"{len(session.models.savers)}. Call run.load after run.distribute."
            )
        problem: Exception | None = None
        reason: str | None = None
        try:
            for index, saver in enumerate(session.models.savers):
                saver.check(*_model(parts, index))
            if own is not None:
                check_random_state(own["random"], session.device)
                if len(own["sync"]) != len(session.models.synchronizers):
                    raise ValueError("it has the strategy's state of another number of models")
                for synchronizer, state in zip(
                    session.models.synchronizers, own["sync"], strict=True
                ):
                    if "model" in state:  # this rank's own, where replicas differ
                        require_fitting_model(synchronizer.model, state["model"])
        except OtherOptimizer as error:
            problem, reason = error, f"{error} {_weights_alone(source, index)}"
        except UNFITTING as error:
            problem, reason = error, str(error) or type(error).__name__
        for failed in session.group.gather_json(reason):
            if failed is not None:
                raise CheckpointError(
                    f"checkpoint {source} does not fit this script's model or optimizer: {failed}"
                ) from problem

    def _load_models(self, parts: dict[str, Any], source: Path | str) -> None:
        """*Together.* Raises `CheckpointError` on all ranks if one of them cannot load.

        The checks cannot foresee what an optimizer that is not torch's own refuses.
        """
        problem: Exception | None = None
        for index, saver in enumerate(self._session.models.savers):
            try:
                saver.load(*_model(parts, index))
            except UNFITTING as error:
                problem = error
                break
        said = None if problem is None else f"{type(problem).__name__}: {problem}"
        for failed in self._session.group.gather_json(said):
            if failed is not None:
                raise CheckpointError(
                    f"checkpoint {source} is refused by the model or its optimizer: {failed}. They "
                    "may hold parts of it: start again, from another checkpoint."
                ) from problem

    def _load_own(self, own: dict[str, Any], source: Path | str) -> None:
        session = self._session
        for synchronizer, state in zip(session.models.synchronizers, own["sync"], strict=True):
            try:
                synchronizer.load_state_dict(state)
            except UNFITTING as error:
                raise CheckpointError(
                    f"the state of {session.strategy} in {source} is refused: "
                    f"{type(error).__name__}: {error}. The model may hold parts of it: start "
                    "again, from another checkpoint or with another --sync."
                ) from error
        restore_random_state(own["random"], session.device)

    def wait_for_save(self) -> Path | str | None:
        """*Together.* Waits for the save in the background; see `Run.wait_for_save`."""
        return self._background.finish_together(self._session.group)

    def close(self) -> None:
        """Waits for the save in the background, and unlocks the folders."""
        try:
            self._background.finish_alone()
        finally:
            self._places.release()

    def _tell_notes(self) -> None:
        notes = self._places.notes
        while notes:
            warnings.warn(notes.pop(0), stacklevel=4)

    def _say(self, message: str) -> None:
        if self._session.rank == 0:
            warnings.warn(message, stacklevel=4)


def _model(parts: dict[str, Any], index: int) -> State:
    state = merged_parts(parts, index)
    assert state is not None
    return state


def _word(layout: str) -> str:
    """As the command line has it."""
    return WHOLE if layout == "None" else layout


def _weights_alone(source: Path | str, index: int) -> str:
    return (
        f"To keep the weights and begin with a new optimizer, leave out run.load, and before "
        f"run.distribute call model.load_state_dict(safetensors.torch.load_file(path)) with "
        f"{source}/model-{index}.safetensors."
    )

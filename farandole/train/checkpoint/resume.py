"""What a run must remember to go on as if it had never stopped, and how it is put back."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from farandole.errors import CheckpointError, UserError
from farandole.train.checkpoint import checkpoint
from farandole.train.checkpoint.contents import check_random_state
from farandole.train.checkpoint.fitting_model import require_fitting_model
from farandole.train.checkpoint.same_optimizer import OtherOptimizer
from farandole.train.checkpoint.saver import State, count_models, merged_parts
from farandole.train.checkpoint.saving import load_together, lock_together, save_together
from farandole.train.randomness import random_state, restore_random_state
from farandole.train.settings import WHOLE

if TYPE_CHECKING:
    from farandole.train.run import Run


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


class RunState:
    """Gathers a run's state for a checkpoint, and restores it."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def save(
        self, folder: Path, user_state: dict[str, Any], keep: int, *, background: bool = False
    ) -> Path:
        """Saves together with all ranks; see `Run.save`."""
        run = self._run
        if keep < 1:
            raise UserError(f"keep={keep}: at least the new checkpoint must stay.")
        if not run._synchronizers:
            run.print("note: this checkpoint holds no model: none was given to run.distribute")
        shared: dict[str, Any] = {
            "run": {
                "samples": run.samples,
                "steps": run.steps,
                "seconds": run.seconds,
                "next_epoch": self._next_epoch(),
                "loaders": [loader.state_dict() for loader in run._loaders],
                "size": run.size,
                "sync": str(run._strategy),
                "layout": str(run._layout),
                "waited_seconds": run.group.meter.waited_seconds,
                "bytes_sent": run.group.meter.bytes_sent,
            },
            "state": user_state,
        }
        own: dict[str, Any] = {"random": random_state(run.device), "sync": []}
        parts: dict[str, Any] = {}
        for index, saver in enumerate(run._savers):
            state = saver.state()
            if state is not None:
                model, optimizer = state
                parts[f"model-{index}{saver.suffix}"] = model
                if optimizer is not None:
                    parts[f"optimizer-{index}{saver.suffix}"] = optimizer
            own["sync"].append(run._synchronizers[index].state_dict())
        try:
            return save_together(
                run.group,
                run._save_folders,
                folder,
                shared,
                own,
                parts,
                keep=keep,
                background=run._background if background else None,
            )
        finally:
            self._tell_notes()

    def _next_epoch(self) -> int:
        """The epoch to go on with: this one, unless its pass over the data has ended.

        A script that reads its data by other means is taken to save at the end of an epoch.
        """
        run = self._run
        if any(loader.done_samples for loader in run._loaders):
            return run.epoch
        over = run._epoch_under_way and (run._pass_ended or not run._loaders)
        return run.epoch + over

    def load(self, folder: Path, *, missing_ok: bool) -> dict[str, Any] | None:
        """Loads together with all ranks; see `Run.load`."""
        run = self._run
        if missing_ok:
            self._take_over(folder)
        if missing_ok and not run.group.broadcast_json(checkpoint.newest(folder) is not None):
            return None
        source, parts, told = load_together(run.group, folder, fallback=run.fallback)
        for each in told:
            self._say(each)
        saved, own = parts["run"], parts.get(f"rank-{run.rank}")
        afresh = self._why_afresh(saved, own)
        if afresh is not None:
            own = None
        self._check_fits(parts, own, source)
        self._load_models(parts, source)
        run.samples, run.steps = saved["samples"], saved["steps"]
        run._began -= saved["seconds"] - run.seconds
        run.group.meter.go_on_from(saved["waited_seconds"], saved["bytes_sent"])
        run.epoch = saved["next_epoch"]
        run.resumed = True
        if run.rank == 0:
            run._save_folders.went_on_from(source)
        run.print(f"going on from {source}, at epoch {run.epoch}")
        run._loader_states = saved["loaders"]
        for loader, state in zip(run._loaders, saved["loaders"], strict=False):
            loader.load_state_dict(state)
        if afresh is not None:
            self._say(afresh)
        elif own is not None:
            self._load_own(own, source)
        user_state: dict[str, Any] = parts["state"]
        return user_state

    def _why_afresh(self, saved: dict[str, Any], own: Any) -> str | None:
        """Why this rank's random state and its strategy's own are not taken up. *Together.*"""
        run = self._run
        layout = saved.get("layout", "None")
        # Together: a rank may have been dead when this was saved.
        if saved["size"] != run.size or not all(run.group.gather_json(own is not None)):
            return (
                f"saved on {saved['size']} workers, resumed on {run.size}: random state and "
                "the strategy's own state start afresh"
            )
        if layout != str(run._layout):
            return (
                f"saved with layout {_word(layout)}, resumed with {_word(str(run._layout))}: "
                "random state and the strategy's own state start afresh"
            )
        if saved["sync"] != str(run._strategy):
            return (
                f"saved under {saved['sync']}, resumed under {run._strategy}: the strategy's "
                "own state starts afresh"
            )
        return None

    def _take_over(self, folder: Path) -> None:
        """Locks this run's own folder before it looks for a checkpoint there.

        A job that was started again beside the one that it shall replace is refused now, and not
        when it has trained as far as its first save. A folder that cannot be written to can still
        be loaded from.
        """
        run = self._run
        if run.group.broadcast_json(not folder.exists() or os.access(folder, os.W_OK)):
            lock_together(run.group, run._save_folders, folder, required=False)
            self._tell_notes()

    def _check_fits(self, parts: dict[str, Any], own: Any, source: Path) -> None:
        """*Together.* Raises `CheckpointError` on all ranks if it fits not on one of them.

        Nothing is changed before all have agreed: of a model in stages, one rank's part may fit and
        another's not.
        """
        run = self._run
        saved = count_models(parts)
        if saved != len(run._savers):
            raise CheckpointError(
                f"the checkpoint holds {saved} model(s), this run has distributed "
                f"{len(run._savers)}. Call run.load after run.distribute."
            )
        problem: Exception | None = None
        reason: str | None = None
        try:
            for index, saver in enumerate(run._savers):
                saver.check(*_model(parts, index))
            if own is not None:
                check_random_state(own["random"], run.device)
                if len(own["sync"]) != len(run._synchronizers):
                    raise ValueError("it has the strategy's state of another number of models")
                for synchronizer, state in zip(run._synchronizers, own["sync"], strict=True):
                    if "model" in state:  # this rank's own, where replicas differ
                        require_fitting_model(synchronizer.model, state["model"])
        except OtherOptimizer as error:
            problem, reason = error, f"{error} {_weights_alone(source, index)}"
        except UNFITTING as error:
            problem, reason = error, str(error) or type(error).__name__
        for failed in run.group.gather_json(reason):
            if failed is not None:
                raise CheckpointError(
                    f"checkpoint {source} does not fit this script's model or optimizer: {failed}"
                ) from problem

    def _load_models(self, parts: dict[str, Any], source: Path) -> None:
        """*Together.* An optimizer that is not torch's own may refuse what nobody could foresee."""
        problem: Exception | None = None
        for index, saver in enumerate(self._run._savers):
            try:
                saver.load(*_model(parts, index))
            except UNFITTING as error:
                problem = error
                break
        said = None if problem is None else f"{type(problem).__name__}: {problem}"
        for failed in self._run.group.gather_json(said):
            if failed is not None:
                raise CheckpointError(
                    f"checkpoint {source} is refused by the model or its optimizer: {failed}. They "
                    "may hold parts of it: start again, from another checkpoint."
                ) from problem

    def _load_own(self, own: dict[str, Any], source: Path) -> None:
        run = self._run
        for synchronizer, state in zip(run._synchronizers, own["sync"], strict=True):
            try:
                synchronizer.load_state_dict(state)
            except UNFITTING as error:
                raise CheckpointError(
                    f"the state of {run._strategy} in {source} is refused: "
                    f"{type(error).__name__}: {error}. The model may hold parts of it: start "
                    "again, from another checkpoint or with another --sync."
                ) from error
        restore_random_state(own["random"], run.device)

    def _tell_notes(self) -> None:
        notes = self._run._save_folders.notes
        while notes:
            warnings.warn(notes.pop(0), stacklevel=4)

    def _say(self, message: str) -> None:
        if self._run.rank == 0:
            warnings.warn(message, stacklevel=4)


def _model(parts: dict[str, Any], index: int) -> State:
    state = merged_parts(parts, index)
    assert state is not None
    return state


def _word(layout: str) -> str:
    """As the command line has it."""
    return WHOLE if layout == "None" else layout


def _weights_alone(source: Path, index: int) -> str:
    return (
        f"To keep the weights and begin with a new optimizer, leave out run.load, and before "
        f"run.distribute call model.load_state_dict(safetensors.torch.load_file(path)) with "
        f"{source / f'model-{index}.safetensors'}."
    )

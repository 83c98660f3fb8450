"""`run.save`, `run.load` and the rest of what a script says of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from farandole.errors import UserError
from farandole.train.checkpoint.run_saving import RunSaving
from farandole.train.loaders import RunLoaders
from farandole.train.passes import Passes
from farandole.train.session import Session


class RunCheckpointing:
    """The methods of a `Run` by which it is saved and resumed."""

    _session: Session
    _passes: Passes
    _loaders: RunLoaders
    _saving: RunSaving

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

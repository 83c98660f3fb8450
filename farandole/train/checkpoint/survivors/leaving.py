"""What a rank leaves when another one was lost in the middle of a step.

Where a model is spread over several ranks, they cannot go on without one of them, and all start
again. The steps since the last checkpoint need not be lost with it: as long as each part of the
model has a survivor, the state before the step is still there. Each survivor writes its own part,
without waiting for anybody, and ends. The next attempt makes a checkpoint of the parts (`joining`).

    checkpoints/.survivors/0/2/000120/      of attempt 0, by rank 2, after 120 steps

Invariant: parts after the same number of steps fit together, and where each part of the model has
a survivor, there is a number of steps for which all parts are left. So all ranks meet in every
step, when the gradients are ready and before any rank changes its weights.

    lost before the meeting    no rank has changed anything: all leave the state before the step
    lost in the meeting        others may have come out of it, and have changed their weights. A
                               rank that cannot know leaves the state before the step, changes its
                               weights too, and leaves that state as well
    lost after the meeting     all ranks change their weights, and leave the state of the next step
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors import SafetensorError

from farandole.errors import CheckpointError, CommError, StageError
from farandole.train.checkpoint import checkpoint
from farandole.train.checkpoint.saver import PartSaver
from farandole.train.checkpoint.survivors.base import Survivors
from farandole.train.randomness import random_state
from farandole.train.session import Session

FOLDER: Final = ".survivors"  # in the folder of the checkpoints, so that it goes with them
PLACE: Final = "survivor"
"""The part that says which place of a replica the rank has, and how many there are."""


class _Between(NamedTuple):
    """What is not in the model, at a moment between two steps."""

    run: dict[str, Any]
    state: dict[str, Any]  # the script's own
    random: dict[str, Any]


class SurvivorSaves(Survivors):
    """Does nothing before `protect`."""

    def __init__(
        self,
        session: Session,
        checkpoints: Path,
        attempt: int,
        run_part: Callable[[], dict[str, Any]],
        script_state: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._session = session
        self.attempt = attempt
        self._folder = checkpoints / FOLDER / str(attempt)
        self._run_part = run_part
        self._script_state = script_state
        self._saver: PartSaver | None = None
        self._at: _Between | None = None  # None: the weights are not those of any such moment
        self._buffers: dict[str, torch.Tensor] = {}  # as they were before the step under way
        self._lost: CommError | None = None  # in the meeting of a step
        self._left: int | None = None  # the number of steps whose state was written last

    def protect(self, saver: PartSaver) -> None:
        self._saver = saver
        if self._session.reporter is not None:
            self._session.reporter.leaves_state()

    def between_steps(self) -> None:
        if self._saver is None:
            return
        self._at = _Between(
            self._run_part(), dict(self._script_state()), random_state(self._session.device)
        )
        if self._lost is not None:
            self._leave()
            raise self._lost

    @contextmanager
    def step(self) -> Iterator[None]:
        saver = self._saver
        # A forward pass may change them, other than the statistics of BatchNorm, which wait for the
        # end of the step.
        self._buffers = {} if saver is None else saver.copied_buffers()
        with self.left_on_loss():
            yield
        self._buffers = {}

    @contextmanager
    def left_on_loss(self) -> Iterator[None]:
        try:
            yield
        except (CommError, StageError):
            self._leave()
            raise

    def meet(self) -> None:
        if self._saver is None:
            return
        try:
            self._session.group.barrier()
        except CommError as error:
            self._leave()
            self._lost = error
        # From here on weights change. An optimizer that fails half-way, or a second step with the
        # same batch, must not be left as the state before the step.
        self._at = None

    def _leave(self) -> None:
        """Raises nothing: the loss itself is about to be raised."""
        saver = self._saver
        if saver is None or self._at is None or self._at.run["steps"] == self._left:
            return
        if len(self._session.models) != 1:  # one may be a step ahead of the other
            return
        run, state, random = self._at
        try:
            model, optimizer = saver.held(self._buffers)
            parts = {
                "run": run,
                "state": state,
                PLACE: {"place": saver.place, "places": saver.places},
                f"rank-{self._session.rank}": {
                    "random": random,
                    "sync": [self._session.models.synchronizers[0].state_dict()],
                },
                f"model-0{saver.suffix}": model,
                f"optimizer-0{saver.suffix}": optimizer,
            }
            target = self._folder / str(self._session.rank) / f"{run['steps']:06d}"
            draft = checkpoint.begin(target)
            checkpoint.commit(draft, target, [checkpoint.write_parts(draft, parts)])
            self._left = run["steps"]
        except (OSError, SafetensorError, CheckpointError, RuntimeError) as error:
            warnings.warn(
                f"rank {self._session.rank} could not leave its state for the next attempt, which "
                f"then goes on from the last checkpoint: {error}",
                stacklevel=2,
            )

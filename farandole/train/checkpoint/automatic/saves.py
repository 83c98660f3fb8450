"""Saves on the way: all ranks at the same step, when rank 0 says so (see `schedule`).

Saves are in the background. One that fails is reported, and the next one comes in its time: a disk
that is full for a while, or a store that does not answer, costs a checkpoint and not the training.
Failures in a row end the run all the same, before more work depends on checkpoints that are not
there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from farandole.errors import CheckpointError
from farandole.train.checkpoint.automatic.attempts import Attempts
from farandole.train.checkpoint.automatic.durations import show_seconds
from farandole.train.checkpoint.automatic.policy import AUTO, Checkpoints
from farandole.train.checkpoint.automatic.schedule import SaveSchedule
from farandole.train.checkpoint.automatic.schedulers import NOTE, has_scheduler
from farandole.train.session import Session
from farandole.train.stopping.optimizer_steps import OptimizerSteps

FAILURES_IN_A_ROW: Final = 3
_WORTH_SAYING: Final = 1.2  # a change of the interval by this factor


@dataclass(frozen=True)
class Saving:
    """What a run does for its automatic saves. All but `write_seconds` are *together*."""

    prepare: Callable[[], None]  # locks the folder
    begin: Callable[[], object]  # a save in the background
    finish: Callable[[], object | None]  # waits for it
    write_seconds: Callable[[], float | None]  # of the last one; None: it is under way


class AutomaticSaves:
    """One rank's part. `between_steps` and `end_of_epoch` are called by all ranks, in order."""

    def __init__(
        self,
        session: Session,
        policy: Checkpoints,
        saving: Saving,
        *,
        has_state: Callable[[], bool] = lambda: True,
    ) -> None:
        self._session = session
        self._has_state = has_state  # the script has given some of its own to save
        self.policy = policy
        self._saving = saving
        self._schedule = SaveSchedule(policy, time.monotonic(), 0)
        self._attempts: Attempts | None = None  # on rank 0
        self._steps: OptimizerSteps | None = None  # from the first place on
        self._place, self._next = 0, 1
        self._failures = 0
        self._best: float | None = None  # that this run has seen, on rank 0
        self._has_better = False  # a value that no checkpoint stands for yet, on rank 0
        self._said: float | None = None  # the interval that the user knows of

    @property
    def has_begun(self) -> bool:
        return self._steps is not None

    @property
    def _only_between_epochs(self) -> bool:
        """Under parameter servers a worker that comes late is not at the same step as the others
        within an epoch. Meeting there, one would wait for a step of another that waits for it."""
        return self._session.group.transport.may_join_late

    # Where all ranks pass

    def begin_epoch(self) -> None:
        """Ranks count places from here: a worker that has just come counts like the others."""
        self._place, self._next = 0, 1

    def between_steps(self, *, within_pass: bool) -> None:
        """Within a pass over the data, gradients may be accumulating: it waits for a step."""
        steps = self._begin(steps_before=int(within_pass))
        can_save = steps.are_done() or not within_pass
        self._place += 1
        if within_pass and (self._place < self._next or self._only_between_epochs):
            return
        if self._meet(within_pass=within_pass) and self._all(can_save):
            self._save()

    def end_of_epoch(self, *, last: bool) -> None:
        """After the script has logged what it measures once an epoch."""
        self._begin()
        if self._meet(at_the_end=last):
            self._save()

    def saved(self) -> None:
        """A checkpoint was begun, by whomever."""
        self._schedule.saved(time.monotonic(), self._session.progress.steps)
        self._has_better = False

    def close(self) -> None:
        if self._attempts is not None:
            self._attempts.end()

    def logged(self, metrics: Mapping[str, float | str]) -> None:
        """On rank 0: a better value asks for a checkpoint of the weights that have it."""
        value = metrics.get(self.policy.metric or "")
        if not isinstance(value, (int, float)) or value != value:
            return
        sign = -1 if self.policy.lower_is_better else 1
        if self._best is None or sign * value > sign * self._best:
            self._best, self._has_better = value, True

    # Together

    def _begin(self, steps_before: int = 0) -> OptimizerSteps:
        """In the first place: what is trained is known then. So many steps have been made."""
        session = self._session
        if self._steps is None:
            # The others have done so before a worker came that is late.
            if not session.group.transport.joined_late and not session.joined_later:
                self._saving.prepare()
            self._steps = OptimizerSteps(session.optimizers)
            self._schedule.saved(time.monotonic(), session.progress.steps - steps_before)
            if self._only_between_epochs:
                session.print(
                    "note: under parameter servers, automatic checkpoints are saved between two "
                    "epochs only"
                )
            if (
                has_scheduler(saver.optimizer for saver in session.models.savers)
                and not self._has_state()
            ):
                session.print(NOTE)
        if session.rank == 0 and self._attempts is None:  # at first, or as another one's successor
            self._attempts = Attempts(session.folder)
            self._attempts.progress()
            self._tell_interval()
        return self._steps

    @property
    def is_rank0_ready(self) -> bool:
        """Whether this rank decides, and can."""
        return self._session.rank == 0 and self._attempts is not None

    def is_due(self, now: float) -> bool:
        """On rank 0: whether it is time for a checkpoint."""
        due = self._schedule.is_due(now, self._session.progress.steps, self._interval())
        if not self._schedule.counts_steps and self._saving.write_seconds() is None:
            due = False  # waiting for the last one would hold up training
        return due or self._has_better

    def _meet(self, *, within_pass: bool = False, at_the_end: bool = False) -> bool:
        """Whether to save now, which rank 0 decides; and when to meet again."""
        answer = torch.zeros(2, dtype=torch.float64)
        if self._session.rank == 0:
            answer[0], answer[1] = self._decide(within_pass, at_the_end)
        if self._session.size > 1:
            self._session.group.broadcast(answer)
        self._next = self._place + int(answer[1])
        return bool(answer[0])

    def _all(self, can_save: bool) -> bool:
        """If one cannot, they ask again in the next place."""
        able = all(self._session.group.gather_json(can_save))
        if not able:
            self._next = self._place + 1
        return able

    def _save(self) -> None:
        began = time.monotonic()
        self._survives(self._finish)
        if self._survives(self._saving.begin):
            self._schedule.measured(time.monotonic() - began)
        self.saved()  # the next try is as far away as after a save
        if self._attempts is not None:
            self._attempts.progress()
            self._tell_interval()

    def _finish(self) -> None:
        if self._saving.finish() is not None:
            self._failures = 0

    def _survives(self, work: Callable[[], object]) -> bool:
        """Whether it was done. All ranks get the same errors, and so count alike."""
        try:
            work()
        except CheckpointError as error:
            self._failures += 1
            self._best = None  # it may be lost; the next value counts as better
            if self._failures >= FAILURES_IN_A_ROW:
                raise CheckpointError(
                    f"{self._failures} automatic saves in a row have failed. The last: {error}"
                ) from error
            self._session.print(f"warning: {error} Training goes on, and saves again later.")
            return False
        return True

    # On rank 0

    def _decide(self, within_pass: bool, at_the_end: bool) -> tuple[bool, int]:
        steps, now = self._session.progress.steps, time.monotonic()
        interval = self._interval()
        due = self.is_due(now) or (at_the_end and self._schedule.has_new(steps))
        wait = self._schedule.places_to_next_meeting(
            self._place,
            now,
            steps,
            interval,
            within_pass=within_pass,
            watches_metric=self.policy.best is not None,
        )
        return due, wait

    def _mtbf(self) -> float:
        assert self._attempts is not None
        return self.policy.mtbf_seconds or self._attempts.mtbf_seconds

    def _interval(self) -> float:
        return self._schedule.interval(self._mtbf(), self._saving.write_seconds() or 0.0)

    def _tell_interval(self) -> None:
        """Where it is chosen: what was chosen, and why, if it has changed much."""
        if self.policy.every != AUTO or self._attempts is None:
            return
        interval, said = self._interval(), self._said
        if said is not None and 1 / _WORTH_SAYING < interval / said < _WORTH_SAYING:
            return
        self._said = interval
        known = "a save holds up training for" if self._schedule.has_measured else "assuming"
        given = f"mtbf={self.policy.mtbf}" if self.policy.mtbf else self._attempts.evidence
        self._session.print(
            f"checkpoints every {show_seconds(interval)} ({known} "
            f"{show_seconds(self._schedule.save_seconds)}; {given})"
        )

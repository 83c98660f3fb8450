"""The meeting after each step: all ranks have their averages, and hear the same news.

What each rank says travels in one small all-reduce, which takes the largest of each:

    newcomers │ signal │ save │ seconds of rank 0 │ seconds of rank 1 │ …

`newcomers`: rank 0 has heard from the launcher that workers come or go. `signal`: one that asks a
rank to save and leave. `save`: rank 0 finds that a checkpoint is due; not when workers come, who
would have no part in it. `seconds`: what this step has cost each rank, without waiting for others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from farandole.comm import Group
from farandole.train.elastic.pace import Pace
from farandole.train.stopping.agreement import StopAgreement
from farandole.worker import elastic
from farandole.worker.generations import Generations

_ASK_SECONDS = 0.25


class StepMeeting:
    """One rank's part."""

    def __init__(self, group: Group, generations: Generations) -> None:
        self.signal = 0
        """The signal that this rank has got; 0: none."""
        self.heard_signal = 0
        self.asks_for_save: Callable[[], bool] = lambda: False
        """On rank 0: whether a checkpoint is due."""
        self.save_after = -1
        """The unit of the last step whose meeting has said that all save."""
        self._group = group
        self._generations = generations
        self._changes: elastic.HostChanges | None = None
        self.restart()

    def restart(self) -> None:
        """Ranks have changed: what was heard is of no interest any more."""
        self.has_newcomers = False
        self._is_told = False
        self._asked = 0.0
        self._began = time.perf_counter()
        self._pace = Pace(self._group.members)

    def hold(self, unit: int) -> None:
        """*Together.* After the step that is this unit."""
        group = self._group
        news = torch.zeros(3 + group.size, dtype=torch.float64)
        if group.rank == 0:
            news[0] = are_told = self._are_told_of_newcomers()
            news[2] = not are_told and self.asks_for_save()
        news[1] = self.signal
        news[3 + group.rank] = time.perf_counter() - self._began
        heard = group.all_reduce(news, "max").tolist()
        self.has_newcomers = bool(heard[0])
        self.heard_signal = self.heard_signal or int(heard[1])
        if heard[2]:
            self.save_after = unit
        if group.rank == 0:
            slow = self._pace.note(heard[3:])
            if slow is not None:
                self._tell_of(slow)

    def step_over(self) -> None:
        """From here on the next step is being computed."""
        self._began = time.perf_counter()

    def _are_told_of_newcomers(self) -> bool:
        now = time.monotonic()
        if not self._is_told and now - self._asked > _ASK_SECONDS:
            self._asked = now
            if self._changes is None:
                self._changes = elastic.HostChanges(os.environ)
            self._is_told = self._changes.since(self._generations.generation) is not None
        return self._is_told

    def _tell_of(self, worker: int) -> None:
        assert self._changes is not None
        self._changes.tell_straggler(self._generations.generation, worker)


class MeetingNews(StopAgreement):
    """A request to stop, as it is heard in the meeting after a step: by all ranks in the same one.

    `StoreAgreement` counts places, which a rank that has just come has not counted.
    """

    always_asks = True

    def __init__(self, meeting: StepMeeting) -> None:
        self._meeting = meeting

    def request(self, number: int) -> None:
        self._meeting.signal = number

    def requested(self) -> int | None:
        return self._meeting.heard_signal or None

    def stops_at(self, place: int) -> int | None:
        return self._meeting.heard_signal or None

"""When the next checkpoint is due, and when the ranks need to ask again. Rank 0's, and pure.

Ranks count places alike: those between two steps in which a run can be saved. Only rank 0 decides,
by its own clock. It tells the others in meetings, and in each how many places later the next one
is; until then a place costs no communication.

    place      1   2   3   4   5   6   7   8   9  10  11
    meeting    +   +       +               +           +      doubling up to about 5 s
    save                                               *      due

So a save comes at most one place too late while steps take as long as before, and if they become
slower, later by no more than the time that so many places take then.
"""

from __future__ import annotations

import math
from typing import Final

from farandole.train.checkpoint.automatic.policy import Checkpoints
from farandole.train.checkpoint.automatic.young_daly import best_interval

APART_SECONDS: Final = 5.0
GUESSED_SAVE_SECONDS: Final = 1.0
"""What a save is taken to cost before one was measured."""
_REMEMBERED: Final = 5  # measured saves


class SaveSchedule:
    """Times are seconds of any clock that does not go back."""

    def __init__(self, policy: Checkpoints, now: float, steps: int) -> None:
        self._every_steps = policy.every_steps
        self._every_seconds = policy.every_seconds
        self._last = now
        self._last_steps = steps
        self._costs: list[float] = []  # for which training stood still
        self._met: tuple[int, float] | None = None  # the last meeting's place and time
        self._per_place = math.inf  # seconds; inf: not measured yet
        self._wait = 1

    @property
    def counts_steps(self) -> bool:
        return self._every_steps is not None

    @property
    def save_seconds(self) -> float:
        """How long training stands still for a save."""
        # The first one allocates memory that all later ones use again.
        later = self._costs[1:] if len(self._costs) > 1 else self._costs
        return sum(later) / len(later) if later else GUESSED_SAVE_SECONDS

    @property
    def has_measured(self) -> bool:
        return bool(self._costs)

    def interval(self, mtbf_seconds: float, write_seconds: float) -> float:
        """The seconds between two saves, where they do not go by steps."""
        if self._every_seconds is not None:
            return self._every_seconds
        return best_interval(self.save_seconds, mtbf_seconds, write_seconds)

    def measured(self, seconds: float) -> None:
        """A save has held up training for so long."""
        # The first stays in front, as long as it is needed to tell that it was the first.
        self._costs = [*self._costs[:1], *self._costs[1:][-_REMEMBERED + 1 :], seconds]

    def saved(self, now: float, steps: int) -> None:
        """There is a new checkpoint, whoever asked for it; the next is counted from here."""
        self._last, self._last_steps = now, steps

    def has_new(self, steps: int) -> bool:
        """Whether any step was made since the last checkpoint."""
        return steps != self._last_steps

    def is_due(self, now: float, steps: int, interval: float) -> bool:
        if not self.has_new(steps):
            return False
        if self._every_steps is not None:
            return steps - self._last_steps >= self._every_steps
        return now - self._last >= interval

    def places_to_next_meeting(
        self,
        place: int,
        now: float,
        steps: int,
        interval: float,
        *,
        within_pass: bool = True,
        watches_metric: bool = False,
    ) -> int:
        """Called in every meeting, with what is known then.

        Before a pass over the data, the time since the last meeting is no measure of steps: an
        evaluation may lie in it.
        """
        if within_pass and self._met is not None and place > self._met[0]:
            self._per_place = (now - self._met[1]) / (place - self._met[0])
        self._met, seconds = (place, now), self._per_place
        if self._every_steps is not None:
            rest = max(1, self._every_steps - (steps - self._last_steps))
            if not watches_metric:
                return rest
        else:
            rest = _places(self._last + interval - now, seconds)
        # Twice as many places as were measured: a few quick steps at the beginning must not
        # decide over hours.
        self._wait = max(1, min(rest, _places(APART_SECONDS, seconds), 2 * self._wait))
        return self._wait


def _places(seconds: float, per_place: float) -> int:
    return max(1, math.ceil(min(seconds / max(per_place, 1e-6), 1e9)))

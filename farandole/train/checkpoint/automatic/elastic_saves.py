"""Saves on the way in a job whose workers come and go.

Ranks cannot count places between two steps there, as they do elsewhere: one that joins in the
middle of an epoch has passed others than the rest. Rank 0 says in the meeting after a step, which
all ranks hold anyway, that a checkpoint is due. All of them save before the next step.

Saves are not in the background: a rank that comes or goes meanwhile would not have the same save
under way as the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from farandole.train.checkpoint.automatic.policy import Checkpoints
from farandole.train.checkpoint.automatic.saves import AutomaticSaves, Saving
from farandole.train.elastic.training import ElasticTraining
from farandole.train.session import Session


class ElasticSaves(AutomaticSaves):
    """One rank's part."""

    def __init__(
        self,
        session: Session,
        policy: Checkpoints,
        saving: Saving,
        elastic: ElasticTraining,
        *,
        has_state: Callable[[], bool],
    ) -> None:
        super().__init__(session, policy, saving, has_state=has_state)
        self._elastic = elastic
        elastic.ask_for_saves(self._asks_for_save)

    def between_steps(self, *, within_pass: bool) -> None:
        steps = self._begin(steps_before=int(within_pass))
        can_save = steps.are_done() or not within_pass
        if self._elastic.is_time_to_save() and self._all(can_save):
            self._save()

    def end_of_epoch(self, *, last: bool) -> None:
        self._elastic.is_time_to_save()  # here all ranks meet in any case
        super().end_of_epoch(last=last)

    def _asks_for_save(self) -> bool:
        """On rank 0, in the meeting after a step. A new rank 0 first passes between two steps."""
        return self.is_rank0_ready and self.is_due(time.monotonic())

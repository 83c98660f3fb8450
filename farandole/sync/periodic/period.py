"""How many steps a rank takes alone before all of them meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from farandole.sync.periodic.meeting import RankStatus

Note = dict[str, float | str]


class Period:
    """Always the same number of steps; subclasses change it at meetings."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def after(self, said: Sequence[RankStatus]) -> Note | None:
        """Decides after a meeting; returns what was decided, if there was a choice.

        `said` is the same on all ranks, and the decision depends on nothing else, such as this
        rank's clock. So all ranks decide the same, and meet again after the same number of steps.
        """
        return None

    @property
    def lacks_loss(self) -> bool:
        """Whether the period depends on the loss, and no loss is known yet."""
        return False

    @property
    def is_overdue(self) -> bool:
        """Whether a loss should have been known long ago."""
        return False

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass

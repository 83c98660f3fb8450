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
        """All ranks have met and said this; returns what was decided, if there was a choice.

        All of them decide the same, because they have heard the same.
        """
        return None

    @property
    def lacks_loss(self) -> bool:
        """Whether it steers by the loss, and nobody has told it one."""
        return False

    @property
    def is_overdue(self) -> bool:
        """Whether it should have been told long ago."""
        return False

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass

"""What a checker raises for a schedule that is wrong."""

from __future__ import annotations

from farandole.errors import FarandoleError


class ScheduleError(FarandoleError):
    """A schedule that does not do what it says; the message names the round, ranks and chunk."""

"""How far each survivor had come when a rank was lost, and what follows from it for all of them.

No processes here; `farandole.comm.units` says why nobody can be more than one unit ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

State = Literal["working", "done", "over"]


class Status(NamedTuple):
    """One survivor's."""

    unit: int  # that it is in, or has come out of last
    state: State  # of that unit: `over` is out of its meeting
    dealt: int = -1  # the generation to whose workers the data are dealt
    readers: tuple[int, ...] = ()  # these workers
    signal: int = 0  # that it has heard of in a meeting, and that asks all to save and leave
    save_after: int = -1  # the unit of a step whose meeting has said that all save

    @classmethod
    def read(cls, fields: Any) -> Status:
        unit, state, dealt, readers, signal, save_after = fields
        return cls(unit, state, dealt, tuple(readers), signal, save_after)


class Verdict(NamedTuple):
    """What a survivor has to do."""

    is_over: bool  # its unit; else it is to be repeated
    top: int  # the unit that the furthest survivor is in
    missed: Status | None  # one whose last dealing this survivor has not heard of
    signal: int  # that any of them has heard of, and all obey at the same step
    save_after: int  # the last step after which any of them saves: all do


def judge(own: Status, everyone: Sequence[Status]) -> Verdict:
    """All survivors, `own` among them, come to matching verdicts."""
    top = max(status.unit for status in everyone)
    at_top = [status for status in everyone if status.unit == top]
    low = min(status.unit for status in everyone)
    assert top - low <= 1, f"survivors are in units {low} to {top}"
    is_over = own.unit < top or any(status.state == "over" for status in at_top)
    is_over |= len(at_top) == len(everyone) and all(s.state != "working" for s in at_top)
    assert not is_over or own.state != "working", f"unit {own.unit} is over, and not done here"
    # A survivor that came out of an earlier recovery, in which a further rank was lost, has dealt
    # the data anew already. Others must do the same before they go on from there.
    latest = max(everyone, key=lambda status: status.dealt)
    missed = latest if latest.dealt > own.dealt else None
    return Verdict(
        is_over,
        top,
        missed,
        max(status.signal for status in everyone),
        max(status.save_after for status in everyone),
    )

"""Why the winner of a race won: what it saved up to the target, against another parallel lane.

Two things can make a lane faster: it waits less for communication, or it needs fewer samples. Both
are measured, so that the sentence says which of them it was, and by how much.
"""

from __future__ import annotations

from farandole.report import units
from farandole.report.history import Point
from farandole.report.standing import Results, Standing

_CLEAR = 1.15  # below this, two figures are much the same


def reason(results: Results) -> str:
    """One sentence, or nothing where nothing is clear."""
    target = results.target
    raced = [row for row in results.standings if row.seconds_to_target is not None]
    # A lane on fewer workers computes less at a time: waiting does not explain the difference.
    alike = [row for row in raced if row.lane.workers == raced[0].lane.workers]
    if target is None or len(alike) < 2:
        return ""
    winner, rival = alike[0], _rival(alike)
    mine, other = (target.first_met(row.lane.history) for row in (winner, rival))
    assert mine is not None, "it has reached the target"
    assert other is not None, "so has the other one"
    gains = [*_waiting(mine, other), *_bytes(mine, other), *_fewer_samples(mine, other)]
    if not gains:
        return ""
    cost = _more_samples(mine, other)
    where = " over the simulated link" if results.simulated_links else ""
    return f"Why: up to the target it {' and '.join(gains)}{where}, against {rival.label}{cost}."


def _rival(raced: list[Standing]) -> Standing:
    """The first lane as given; if that one won, the second."""
    first = min(raced, key=lambda row: row.index)
    return first if first is not raced[0] else raced[1]


def _waiting(mine: Point, other: Point) -> list[str]:
    ours, theirs = mine.waited_seconds, other.waited_seconds
    if ours * _CLEAR >= theirs:
        return []
    return [f"waited {units.seconds(ours)} instead of {units.seconds(theirs)}"]


def _bytes(mine: Point, other: Point) -> list[str]:
    ours, theirs = mine.bytes_sent, other.bytes_sent
    if ours * _CLEAR >= theirs:
        return []
    return [f"sent {units.bytes_count(ours)} instead of {units.bytes_count(theirs)}"]


def _fewer_samples(mine: Point, other: Point) -> list[str]:
    if mine.samples * _CLEAR >= other.samples:
        return []
    return [f"needed {mine.samples:,} samples instead of {other.samples:,}"]


def _more_samples(mine: Point, other: Point) -> str:
    if not other.samples or mine.samples <= other.samples * _CLEAR:
        return ""
    return f", although it needed {mine.samples / other.samples:.1f} times the samples"

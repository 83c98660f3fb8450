"""Why the winner of a race won: what it saved, against the first lane or the runner-up.

Two things can make a lane faster: it waits less for communication, or it needs fewer samples. Both
are measured, so that the sentence says which of them it was, and by how much.
"""

from __future__ import annotations

from farandole.report import units
from farandole.report.lane import Lane
from farandole.report.standing import Results, Standing
from farandole.report.target import Target

_CLEAR = 1.15  # below this, two figures are much the same


def reason(results: Results) -> str:
    """One sentence, or nothing where nothing is clear."""
    target = results.target
    raced = [row for row in results.standings if row.seconds_to_target is not None]
    if target is None or len(raced) < 2:
        return ""
    winner, rival = raced[0], _rival(raced)
    facts = [*_waiting(winner, rival), *_bytes(winner, rival), *_samples(winner, rival, target)]
    if not facts:
        return ""
    where = " over the simulated link" if results.simulated_links else ""
    return f"Why: against {rival.label}, it {', '.join(facts)}{where}."


def _rival(raced: list[Standing]) -> Standing:
    """The first lane as given, if it took part, since speed-ups are over that; else the second."""
    first = min(raced, key=lambda row: row.index)
    return first if first is not raced[0] else raced[1]


def _waiting(winner: Standing, rival: Standing) -> list[str]:
    ours, theirs = winner.lane.waited_share, rival.lane.waited_share
    if ours is None or theirs is None or abs(ours - theirs) < 0.05:
        return []
    return [f"waited {units.share(ours)} of its time instead of {units.share(theirs)}"]


def _bytes(winner: Standing, rival: Standing) -> list[str]:
    ours, theirs = _rate(winner.lane), _rate(rival.lane)
    if not ours or not theirs or ours * _CLEAR > theirs:
        return []
    times = theirs / ours
    return [f"sent {times:.0f} times less per sample" if times >= 2 else "sent less per sample"]


def _samples(winner: Standing, rival: Standing, target: Target) -> list[str]:
    mine, other = (target.first_met(row.lane.history) for row in (winner, rival))
    if mine is None or other is None or not mine.samples or not other.samples:
        return []
    ratio = mine.samples / other.samples
    if ratio > _CLEAR:
        return [f"needed {ratio:.1f} times the samples"]
    return [f"needed {1 / ratio:.1f} times fewer samples"] if ratio < 1 / _CLEAR else []


def _rate(lane: Lane) -> float:
    samples = lane.history.last.samples
    return lane.bytes_sent / samples if samples else 0.0

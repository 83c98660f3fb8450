"""Who does what when: collectives as pure data, a checker that proves them, and what they cost."""

from __future__ import annotations

from farandole.schedule.catalog import ALGORITHMS, Algorithm, Builder, build, register
from farandole.schedule.checker import ScheduleError, check
from farandole.schedule.cost import Link, cost_seconds
from farandole.schedule.facts import Facts
from farandole.schedule.halving import halving_doubling
from farandole.schedule.levels import most_square, torus, two_level
from farandole.schedule.rings import ring, ring_all_gather, ring_reduce_scatter
from farandole.schedule.rounds import (
    Collective,
    Move,
    Op,
    RankRound,
    Round,
    Schedule,
    Transfer,
    piece,
    piece_bounds,
)
from farandole.schedule.stars import naive, parameter_server
from farandole.schedule.trees import double_tree

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Builder",
    "Collective",
    "Facts",
    "Link",
    "Move",
    "Op",
    "RankRound",
    "Round",
    "Schedule",
    "ScheduleError",
    "Transfer",
    "build",
    "check",
    "cost_seconds",
    "double_tree",
    "halving_doubling",
    "most_square",
    "naive",
    "parameter_server",
    "piece",
    "piece_bounds",
    "register",
    "ring",
    "ring_all_gather",
    "ring_reduce_scatter",
    "torus",
    "two_level",
]

"""Who does what when: collectives as pure data, a checker that proves them, and what they cost."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farandole.schedule.catalog import ALGORITHMS, Algorithm, Builder, build, register
    from farandole.schedule.checker import check
    from farandole.schedule.cost import Link, cost_seconds
    from farandole.schedule.error import ScheduleError
    from farandole.schedule.facts import Facts
    from farandole.schedule.halving import halving_doubling
    from farandole.schedule.levels import most_square, torus, two_level
    from farandole.schedule.pieces import piece, piece_bounds
    from farandole.schedule.rings import ring, ring_all_gather, ring_reduce_scatter
    from farandole.schedule.rounds import Collective, Move, Op, RankRound, Round, Schedule, Transfer
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

_HOME = {
    "catalog": (
        "ALGORITHMS",
        "Algorithm",
        "Builder",
        "build",
        "register",
    ),
    "checker": ("check",),
    "error": ("ScheduleError",),
    "cost": (
        "Link",
        "cost_seconds",
    ),
    "facts": ("Facts",),
    "halving": ("halving_doubling",),
    "levels": (
        "most_square",
        "torus",
        "two_level",
    ),
    "rings": (
        "ring",
        "ring_all_gather",
        "ring_reduce_scatter",
    ),
    "rounds": (
        "Collective",
        "Move",
        "Op",
        "RankRound",
        "Round",
        "Schedule",
        "Transfer",
    ),
    "pieces": ("piece", "piece_bounds"),
    "stars": (
        "naive",
        "parameter_server",
    ),
    "trees": ("double_tree",),
}


def __getattr__(name: str) -> Any:
    """Imports what is asked for: help texts name pipelines, and must not wait for NumPy."""
    for home, names in _HOME.items():
        if name in names:
            value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

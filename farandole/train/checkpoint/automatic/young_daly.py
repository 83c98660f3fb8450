"""How often to save: Young's and Daly's optimum.

A save costs C seconds of training, and failures come M seconds apart in the mean. Saving every T
seconds then wastes about C/T of the time for saves and T/2M for what is lost at each failure.

    waste
      │ \\                         __/
      │  \\  saves            __--    lost work
      │   `.             __--
      │     `-.____..--'
      └──────────┴──────────────────── T
             √(2·C·M)

The minimum is at √(2·C·M) (Young, 1974), for C much smaller than M. Daly (2006) derives more terms
for larger C, and takes M itself where a save takes 2·M or longer. (There the two branches differ by
a ninth of M. A run whose saves take that long makes no progress either way.)

Saves in the background: C is how long training stands still. How long the writing goes on beside it
moves the waste, but not its minimum (Vaidya, 1997); it only bounds T from below, because one save
is under way at a time.
"""

from __future__ import annotations

import math


def young(save_seconds: float, mtbf_seconds: float) -> float:
    """Young's first-order optimum of the time between two saves."""
    return math.sqrt(2.0 * save_seconds * mtbf_seconds)


def daly(save_seconds: float, mtbf_seconds: float) -> float:
    """Daly's higher-order optimum of the time between the end of a save and the next one."""
    if save_seconds >= 2.0 * mtbf_seconds:
        return mtbf_seconds
    root = math.sqrt(save_seconds / (2.0 * mtbf_seconds))
    correction = 1.0 + root / 3.0 + root * root / 9.0
    return young(save_seconds, mtbf_seconds) * correction - save_seconds


def best_interval(
    save_seconds: float, mtbf_seconds: float, write_seconds: float = 0.0, least: float = 1.0
) -> float:
    """The time between the beginnings of two saves.

    Not below `write_seconds`, for which a save is under way, nor below `least`.
    """
    chosen = daly(save_seconds, mtbf_seconds) + save_seconds
    return max(chosen, write_seconds, least)

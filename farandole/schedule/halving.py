"""Recursive halving and doubling: as few bytes as the ring, in 2 lg p rounds instead of 2(p−1)."""

from __future__ import annotations

import numpy as np

from farandole.schedule.rounds import Round, Schedule, require_ranks


def halving_doubling(ranks: int) -> Schedule:
    """Rabenseifner's algorithm: pairs halve what they hold, then double it again.

    ```
    what each of 4 ranks sends, and to whom   rank 0      rank 1      rank 2      rank 3
    round 0, add: a half, 2 ranks away        2-3 to 2    2-3 to 3    0-1 to 0    0-1 to 1
    round 1, add: a quarter, 1 rank away      1 to 1      0 to 0      3 to 3      2 to 2
    round 2, copy                             0 to 1      1 to 0      2 to 3      3 to 2
    round 3, copy                             0-1 to 2    0-1 to 3    2-3 to 0    2-3 to 1
    ```

    When p is no power of two, the largest one below it does the above. Each rank beyond it first
    sends its whole vector to a partner, waits, and gets the sum from there: two rounds more.
    """
    require_ranks("halving_doubling", ranks)
    core = 1 << (ranks.bit_length() - 1)  # the largest power of two that is at most p
    here = np.arange(core, dtype=np.int32)
    extra = np.arange(core, ranks, dtype=np.int32)
    distances = [1 << level for level in range(core.bit_length() - 1)]
    rounds = []
    if extra.size:
        rounds.append(Round.of(extra, extra - core, 0, core, "add"))
    for distance in reversed(distances):
        # Partners differ in one bit, so the pairs of a round have no rank in common. After the
        # round both hold the sum of one half each, over twice as many ranks.
        there = here ^ distance
        half = there // distance * distance  # the partner's half of what both still hold
        rounds.append(Round.of(here, there, half, half + distance, "add"))
    for distance in distances:
        half = here // distance * distance  # all that is finished here
        rounds.append(Round.of(here, here ^ distance, half, half + distance, "copy"))
    if extra.size:
        rounds.append(Round.of(extra - core, extra, 0, core, "copy"))
    return Schedule("halving_doubling", ranks, core, tuple(rounds))

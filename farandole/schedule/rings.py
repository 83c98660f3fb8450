"""The ring: every rank talks to its two neighbours only, and sends as few bytes as any algorithm.

Its two halves are collectives of their own, and other algorithms are built from them.
"""

from __future__ import annotations

import numpy as np

from farandole.schedule.rounds import Op, Round, Schedule, require_ranks


def ring(ranks: int) -> Schedule:
    """A reduce-scatter, then an all-gather: 2(p−1) rounds, 1/p of the vector in each.

    ```
    what each of 3 ranks sends to the next one     rank 0   rank 1   rank 2
    round 0, add                                   chunk 2  chunk 0  chunk 1
    round 1, add                                   chunk 1  chunk 2  chunk 0   rank r now owns r
    round 2, copy                                  chunk 0  chunk 1  chunk 2
    round 3, copy                                  chunk 2  chunk 0  chunk 1
    ```
    """
    rounds = ring_reduce_scatter(ranks).rounds + ring_all_gather(ranks).rounds
    return Schedule("ring", ranks, ranks, rounds)


def ring_reduce_scatter(ranks: int) -> Schedule:
    """Chunk r starts at rank r + 1 and collects every contribution on its way round to rank r."""
    rounds = _turns(ranks, offset=1, op="add")
    return Schedule("ring_reduce_scatter", ranks, ranks, rounds, "reduce_scatter")


def ring_all_gather(ranks: int) -> Schedule:
    """Chunk r starts at rank r, which owns it, and leaves a copy with every rank it passes."""
    rounds = _turns(ranks, offset=0, op="copy")
    return Schedule("ring_all_gather", ranks, ranks, rounds, "all_gather")


def _turns(ranks: int, offset: int, op: Op) -> tuple[Round, ...]:
    """In turn k every rank sends chunk `rank - offset - k` to the next rank."""
    require_ranks("ring", ranks)
    # The wheel is written out twice, so that every turn of it is a view and takes no memory.
    wheel = np.tile(np.arange(ranks, dtype=np.int32), 2)
    after = wheel + 1
    here, following = wheel[:ranks], wheel[1 : ranks + 1]
    starts = ((-offset - k) % ranks for k in range(ranks - 1))
    return tuple(
        Round.of(here, following, wheel[at : at + ranks], after[at : at + ranks], op)
        for at in starts
    )

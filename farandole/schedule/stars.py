"""Two rounds, and a receiver that everyone writes to at once: the simplest two, and the slowest."""

from __future__ import annotations

import numpy as np

from farandole.errors import UserError
from farandole.schedule.rounds import Round, Schedule, require_ranks


def naive(ranks: int, root: int = 0) -> Schedule:
    """Everyone sends all of the vector to one root, which sends the sum to everyone.

    ```
    4 ranks, 1 chunk      0    1    2    3
    round 0               ◄─── ◄─── ◄───      1, 2 and 3 add theirs to 0's
    round 1               ───► ───► ───►      0 copies the sum to 1, 2 and 3
    ```
    """
    require_ranks("naive", ranks)
    if not 0 <= root < ranks:
        raise UserError(f"naive: the root {root} is not among {ranks} ranks.")
    others = np.delete(np.arange(ranks, dtype=np.int32), root)
    rounds = (Round.of(others, root, 0, 1, "add"), Round.of(root, others, 0, 1, "copy"))
    return Schedule("naive", ranks, chunks=1, rounds=rounds if ranks > 1 else ())


def parameter_server(ranks: int) -> Schedule:
    """Every rank is the root of its own 1/p of the vector.

    ```
    3 ranks, 3 chunks     rank 0            rank 1            rank 2
    round 0, add          1 → 1, 2 → 2      0 → 0, 2 → 2      0 → 0, 1 → 1     (chunk → rank)
    round 1, copy         0 → 1, 0 → 2      1 → 0, 1 → 2      2 → 0, 2 → 1
    ```
    """
    require_ranks("parameter_server", ranks)
    every = np.arange(ranks, dtype=np.int32)
    # All pairs that differ, by their distance on a circle: whoever works through the list in order
    # meets a different owner each time, rather than everyone calling on owner 0 first.
    owner = np.tile(every, ranks - 1)
    other = (owner + np.repeat(every[1:], ranks)) % np.int32(ranks)
    rounds = (
        Round.of(other, owner, owner, owner + 1, "add"),
        Round.of(owner, other, owner, owner + 1, "copy"),
    )
    return Schedule("parameter_server", ranks, ranks, rounds if ranks > 1 else ())

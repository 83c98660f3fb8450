"""Two levels: fast links inside a group, slow ones between groups; and the torus, the same idea.

Most bytes stay inside: between groups of g ranks, each rank all-reduces only 1/g of the vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from farandole.errors import UserError
from farandole.schedule.compose import placed, side_by_side
from farandole.schedule.pieces import piece, piece_bounds
from farandole.schedule.rings import ring, ring_all_gather, ring_reduce_scatter
from farandole.schedule.rounds import Round, Schedule, require_ranks
from farandole.topology import Host, Topology


def two_level(
    hosts: Topology | Sequence[Sequence[int]], across: Callable[[int], Schedule] = ring
) -> Schedule:
    """A reduce-scatter in each host, all-reduces across the hosts, an all-gather in each host.

    ```
    2 hosts of 2 ranks       host A: 0, 1              host B: 2, 3
    1. in the host           0 ⇄ 1                     2 ⇄ 3          half the vector each
    2. across the hosts      0 ⇄ 2 the first half, 1 ⇄ 3 the second
    3. in the host           0 ⇄ 1                     2 ⇄ 3
    ```

    `across` builds the all-reduce between the hosts, given how many there are.

    Hosts may hold different numbers of ranks. The vector is cut into as many pieces as the largest
    host has ranks; in a smaller host some ranks look after several neighbouring pieces.
    """
    if not isinstance(hosts, Topology):
        hosts = Topology(tuple(Host(str(i), tuple(ranks)) for i, ranks in enumerate(hosts)))
    groups = [host.ranks for host in hosts.hosts if host.ranks]
    rounds, chunks = _inside_across_inside(groups, across)
    return Schedule("two_level", hosts.size, chunks, rounds)


def torus(columns: int, rows: int) -> Schedule:
    """Ranks on a grid whose lines are rings: along X, then along Y on what is left, then along X.

    ```
    3 columns, 2 rows      0 → 1 → 2 → 0      1. reduce-scatter along each row
                           ↓   ↓   ↓          2. all-reduce of a third along each column
                           3 → 4 → 5 → 3      3. all-gather along each row
                           ↓   ↓   ↓
                           0   1   2
    ```
    """
    if columns < 1 or rows < 1:
        raise UserError(f"torus: {columns} × {rows} ranks; give at least 1 × 1.")
    lines = [range(row * columns, (row + 1) * columns) for row in range(rows)]
    rounds, chunks = _inside_across_inside(lines, across=ring)
    return Schedule("torus", columns * rows, chunks, rounds)


def most_square(ranks: int) -> tuple[int, int]:
    """The columns and rows of the squarest grid that holds exactly `ranks`; 1 × p for a prime p."""
    require_ranks("torus", ranks)
    columns = next(c for c in range(math.isqrt(ranks), 0, -1) if ranks % c == 0)
    return columns, ranks // columns


def _inside_across_inside(
    groups: Sequence[Sequence[int]], across: Callable[[int], Schedule]
) -> tuple[tuple[Round, ...], int]:
    """The rounds, and the number of chunks: one per piece and chunk of the all-reduce across."""
    pieces = max(len(group) for group in groups)
    between = across(len(groups))
    chunks_per_piece = between.chunks
    # 1. and 3.: in a group of g ranks, rank i has charge of the i-th of g runs of pieces.
    runs = [piece_bounds(len(group), pieces) * chunks_per_piece for group in groups]
    scatter = side_by_side(
        placed(ring_reduce_scatter(len(group)), group, run)
        for group, run in zip(groups, runs, strict=True)
    )
    gather = side_by_side(
        placed(ring_all_gather(len(group)), group, run)
        for group, run in zip(groups, runs, strict=True)
    )
    # 2.: for each piece, the ranks that have charge of it, one in each group.
    in_charge = [
        [rank for i, rank in enumerate(group) for _ in piece(i, len(group), pieces)]
        for group in groups
    ]
    # Pieces are all-reduced independently of each other, so their rounds may go side by side: a
    # rank with several pieces sends several messages in a round, and no chunk is in two of them.
    middle = side_by_side(
        placed(
            between,
            [charge[index] for charge in in_charge],
            piece_bounds(chunks_per_piece, chunks_per_piece) + index * chunks_per_piece,
        )
        for index in range(pieces)
    )
    return scatter + middle + gather, pieces * chunks_per_piece

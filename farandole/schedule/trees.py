"""The double binary tree: latency of a tree, and yet every rank's link is busy in both directions.

In one binary tree half the ranks are leaves, and a leaf sends once where an inner node receives
twice. So the vector is halved and each half gets a tree of its own; who is an inner node in one
tree is a leaf in the other.
"""

from __future__ import annotations

import numpy as np

from farandole.errors import UserError
from farandole.schedule.rounds import Integers, Round, Schedule, require_ranks


def double_tree(ranks: int, segments: int = 8) -> Schedule:
    """Sums go up to the roots and the results down again, one segment behind the other.

    ```
    7 ranks:      3             tree 0 (first half)        2             tree 1 (second half)
              ┌───┴───┐         inner nodes odd        ┌───┴───┐         inner nodes even
              1       5                                0       4
            ┌─┴─┐   ┌─┴─┐                            ┌─┴─┐   ┌─┴─┐
            0   2   4   6                            6   1   3   5

    who sends which of two segments a, b in tree 0
    round         0            1            2            3            4
    up, add       leaves: a    leaves: b
                               1, 5: a      1, 5: b
    down, copy                              3: a         3: b
                                                         1, 5: a      1, 5: b
    ```

    A tree is D = ⌊lg p⌋ edges high, and S segments take 2D + S − 1 rounds. Few segments suit short
    vectors, many suit long ones: with S = 1 a rank waits for each whole half.
    """
    require_ranks("double_tree", ranks)
    if segments < 1:
        raise UserError(f"double_tree: {segments} segments; give at least 1.")
    parent, depth = _tree(ranks)
    height = int(depth.max())
    # Ranks by position: in the second tree everyone sits one place further on, which exchanges
    # inner nodes (odd places) and leaves (even places).
    places = [np.roll(np.arange(ranks, dtype=np.int32), shift) for shift in (0, 1)]
    below = np.flatnonzero(depth > 0)
    rounds = []
    for turn in range(2 * height + segments - 1 if ranks > 1 else 0):
        parts = []
        for tree, place in enumerate(places):
            child, above, chunk = place[below], place[parent[below]], tree * segments
            # An edge at depth d carries segment s up in turn height − d + s: what comes from below
            # the child went one turn before. It carries s down in turn height + d − 1 + s: one turn
            # after the parent got it. So a segment is whole before it is copied. Both trees run at
            # once, because they have no chunk in common.
            rising = turn - (height - depth[below])
            now = (rising >= 0) & (rising < segments)
            at = chunk + rising[now]
            parts.append(Round.of(child[now], above[now], at, at + 1, "add"))
            falling = turn - (height + depth[below] - 1)
            now = (falling >= 0) & (falling < segments)
            at = chunk + falling[now]
            parts.append(Round.of(above[now], child[now], at, at + 1, "copy"))
        rounds.append(Round.merged(parts))
    return Schedule("double_tree", ranks, 2 * segments, tuple(rounds))


def _tree(places: int) -> tuple[Integers, Integers]:
    """The parent and the depth of every place in a balanced tree whose leaves are the even places.

    Reading the places from left to right walks the tree in order. The root is its own parent.
    """
    parent = np.zeros(places, dtype=np.int32)
    depth = np.zeros(places, dtype=np.int32)
    todo = [(0, places, -1)]  # places low … high - 1, which hang below a place; low is even
    while todo:
        low, high, above = todo.pop()
        if low >= high:
            continue
        odd_places = (high - low) // 2
        top = low + 2 * (odd_places // 2) + 1 if odd_places else low
        parent[top] = top if above < 0 else above
        depth[top] = 0 if above < 0 else depth[above] + 1
        todo += [(low, top, top), (top + 1, high, top)]
    return parent, depth

"""Which rank computes what: each place of a pipeline's schedule has a tile group, a rank a tile.

    place      0            1            2
    ranks      0  1         4  5         8  9        tiles=2x2: shards 0 1
               2  3         6  7        10 11                          2 3

The ranks of a tile group come one after the other, so tiles are neighbours on a host. Between
stages each shard is a pipeline of its own; inside a tile group shards exchange what the others
need.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from farandole.layout.layout import Layout
from farandole.schedule.pipelines import Pipeline


class TileGroups:
    """`sizes`: how many ranks each place has."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        # Invariant: the ranks of a place are consecutive, and its shards are numbered in their
        # order. So a shard has the same number in every stage, and knows its partner without
        # asking.
        self._first = [0, *accumulate(self.sizes)]

    @property
    def ranks(self) -> int:
        return self._first[-1]

    def place(self, rank: int) -> int:
        return next(place for place in range(len(self.sizes)) if rank < self._first[place + 1])

    def shard(self, rank: int) -> int:
        return rank - self._first[self.place(rank)]

    def rank(self, place: int, shard: int) -> int | None:
        """None: that place has no such shard."""
        return self._first[place] + shard if shard < self.sizes[place] else None

    def members(self, place: int) -> range:
        return range(self._first[place], self._first[place + 1])

    def all_of(self, places: Sequence[int]) -> tuple[int, ...]:
        """The ranks of several places, in order."""
        return tuple(sorted(rank for place in places for rank in self.members(place)))


def describe_grid(tile_groups: TileGroups, places: Pipeline, layout: Layout, replicas: int) -> str:
    """The grid of ranks of the first replica, stage by stage, as `farandole run` prints it."""
    counts = [f"{layout.tiles} tiles"] if layout.tiles else []
    if layout.channels > 1:
        counts.append(f"{layout.channels} parts of the channels")
    counts.append(f"{places.stages} {'stage' if places.stages == 1 else 'stages'}")
    if len(places.homes) > 1:
        counts.append("2 directions")
    counts.append(f"{replicas} {'replica' if replicas == 1 else 'replicas'}")
    lines = [f"grid: {' × '.join(counts)}, {tile_groups.ranks * replicas} ranks"]
    width = len(str(tile_groups.ranks - 1))
    columns = layout.tiles[-1] if layout.tiles else 1
    names = [
        f"  stage {'+'.join(map(str, places.held(place)))}"
        for place in range(len(tile_groups.sizes))
    ]
    longest = max(map(len, names))
    for place, name in enumerate(names):
        ranks = [f"{rank:{width}}" for rank in tile_groups.members(place)]
        rows = [" ".join(ranks[start : start + columns]) for start in range(0, len(ranks), columns)]
        lines.append(f"{name:{longest}}  ranks {rows[0]}")
        lines += [" " * (longest + 8) + row for row in rows[1:]]
    return "\n".join(lines)

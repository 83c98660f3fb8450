"""Which rank sits where: numbers only."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.layout import parse_layout
from farandole.layout.tile_groups import TileGroups, describe_grid


@settings(max_examples=50, derandomize=True)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_every_rank_has_one_place(sizes: list[int]) -> None:
    tile_groups = TileGroups(sizes)
    assert tile_groups.ranks == sum(sizes)
    places = [
        (tile_groups.place(rank), tile_groups.shard(rank)) for rank in range(tile_groups.ranks)
    ]
    assert places == [(place, shard) for place, size in enumerate(sizes) for shard in range(size)]
    for rank, (place, shard) in enumerate(places):
        assert tile_groups.rank(place, shard) == rank
        assert rank in tile_groups.members(place)
    for place, size in enumerate(sizes):
        assert tile_groups.rank(place, size) is None
    assert tile_groups.all_of(range(len(sizes))) == tuple(range(tile_groups.ranks))


def test_the_grid_as_it_is_printed() -> None:
    layout = parse_layout("tiles=2x3,stages=3,tiled=1")
    told = describe_grid(TileGroups(layout.group_sizes), layout.pipeline(), layout, 2)
    assert told.splitlines() == [
        "grid: 2x3 tiles × 3 stages × 2 replicas, 16 ranks",
        "  stage 0  ranks 0 1 2",
        "                 3 4 5",
        "  stage 1  ranks 6",
        "  stage 2  ranks 7",
    ]

"""Which rank sits where: numbers only."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.layout import parse_layout
from farandole.layout.teams import Teams, describe_teams


@settings(max_examples=50, derandomize=True)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_every_rank_has_one_seat(sizes: list[int]) -> None:
    teams = Teams(sizes)
    assert teams.ranks == sum(sizes)
    seats = [(teams.place(rank), teams.lane(rank)) for rank in range(teams.ranks)]
    assert seats == [(place, lane) for place, size in enumerate(sizes) for lane in range(size)]
    for rank, (place, lane) in enumerate(seats):
        assert teams.rank(place, lane) == rank
        assert rank in teams.members(place)
    for place, size in enumerate(sizes):
        assert teams.rank(place, size) is None
    assert teams.all_of(range(len(sizes))) == tuple(range(teams.ranks))


def test_the_grid_as_it_is_printed() -> None:
    layout = parse_layout("tiles=2x3,stages=3,tiled=1")
    told = describe_teams(Teams(layout.teams), layout.pipeline(), layout, 2)
    assert told.splitlines() == [
        "grid: 2x3 tiles × 3 stages × 2 replicas, 16 ranks",
        "  stage 0  ranks 0 1 2",
        "                 3 4 5",
        "  stage 1  ranks 6",
        "  stage 2  ranks 7",
    ]

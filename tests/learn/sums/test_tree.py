"""The one order of all merges."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from farandole.learn.sums.tree import branches, join, pieces, reduce

totals = st.integers(1, 60)


def shape(total: int) -> str:
    """The whole tree, as text."""
    return reduce((0, total), str, lambda left, right: f"({left} {right})")


def test_the_left_half_is_the_largest_power_of_two() -> None:
    assert shape(6) == "(((0 1) (2 3)) (4 5))"
    assert shape(1) == "0"
    assert shape(7) == "(((0 1) (2 3)) ((4 5) 6))"


@given(totals, st.integers(1, 12))
def test_parts_of_any_number_of_ranks_join_to_the_same_tree(total: int, ranks: int) -> None:
    found = {}
    for rank in range(ranks):
        own = branches(total * rank // ranks, total * (rank + 1) // ranks, total)
        for branch in own:
            found[branch] = reduce(branch, str, lambda left, right: f"({left} {right})")
    assert join(found, total, lambda left, right: f"({left} {right})") == shape(total)


@given(totals, st.integers(1, 100))
def test_pieces_are_branches_that_cover_each_chunk_once(total: int, wanted: int) -> None:
    found = pieces(total, wanted)
    assert [chunk for first, end in found for chunk in range(first, end)] == list(range(total))
    parts = {each: reduce(each, str, lambda left, right: f"({left} {right})") for each in found}
    assert join(parts, total, lambda left, right: f"({left} {right})") == shape(total)
    assert len(found) >= min(total, wanted)

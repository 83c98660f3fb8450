"""Every row of a table lives in one place, and all ways of asking for it agree where that is."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.errors import UserError
from farandole.server.tables import DTYPES, Table

tables = st.builds(
    Table,
    name=st.text("abc", min_size=1, max_size=4),  # where its first block is depends on the name
    rows=st.integers(1, 200),
    width=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    rule=st.just("add"),
    block_rows=st.integers(1, 60),
    ranges=st.integers(1, 9),
)


def homes_of(table: Table) -> list[tuple[int, int]]:
    """For every row its range and its number there: blocks dealt out like cards, one by one."""
    filled = [0] * table.ranges
    home = table.id % table.ranges
    homes = []
    for row in range(table.rows):
        if row and row % table.block_rows == 0:
            home = (home + 1) % table.ranges
        homes.append((home, filled[home]))
        filled[home] += 1
    return homes


@settings(max_examples=50)
@given(table=tables, data=st.data())
def test_pieces_hold_each_row_of_a_run_once(table, data):
    start = data.draw(st.integers(0, table.rows))
    stop = data.draw(st.integers(start, table.rows))
    homes = homes_of(table)
    found = {}
    ranges = []
    for piece in table.pieces(start, stop):
        ranges.append(piece.range)
        rows = [row for span in piece.spans for row in range(span.start, span.stop)]
        assert all(span.start < span.stop for span in piece.spans)
        assert len(rows) == piece.stop - piece.start
        for row, local in zip(rows, range(piece.start, piece.stop), strict=True):
            assert row not in found
            found[row] = (piece.range, local)
    assert len(ranges) == len(set(ranges))  # one run in each
    assert found == {row: homes[row] for row in range(start, stop)}


@settings(max_examples=50)
@given(table=tables, data=st.data())
def test_scattered_rows_are_where_pieces_are(table, data):
    listed = data.draw(st.lists(st.integers(0, table.rows - 1), max_size=30))
    rows = torch.tensor(listed, dtype=torch.int64)
    homes = homes_of(table)
    positions_seen = []
    for range_, local, positions in table.scattered(rows):
        positions_seen += positions.tolist()
        there = zip(local.tolist(), positions.tolist(), strict=True)
        assert all(homes[listed[position]] == (range_, row) for row, position in there)
    assert sorted(positions_seen) == list(range(len(listed)))


@settings(max_examples=50)
@given(table=tables, data=st.data())
def test_sorted_rows_stay_sorted_in_each_range(table, data):
    listed = sorted(data.draw(st.sets(st.integers(0, table.rows - 1), min_size=1)))
    for _, local, _ in table.scattered(torch.tensor(listed)):
        assert local.tolist() == sorted(set(local.tolist()))


@settings(max_examples=50)
@given(table=tables)
def test_a_range_holds_as_many_rows_as_it_was_dealt(table):
    homes = [range_ for range_, _ in homes_of(table)]
    assert [table.rows_in(r) for r in range(table.ranges)] == [
        homes.count(r) for r in range(table.ranges)
    ]
    assert table.used_ranges == sorted(set(homes))


@settings(max_examples=50)
@given(
    rows=st.integers(1, 10**7),
    width=st.integers(1, 300),
    ranges=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
)
def test_a_dense_table_has_one_block_in_a_range(rows, width, ranges, dtype):
    table = Table.dense("t", rows, ranges=ranges, width=width, dtype=dtype)
    pieces = list(table.pieces(0, rows))
    assert all(len(piece.spans) == 1 for piece in pieces)  # so that nothing need be cut
    assert sum(table.rows_in(r) for r in range(ranges)) == rows


def test_a_small_dense_table_stays_whole_and_a_sparse_one_is_spread():
    assert len(Table.dense("t", 1000, ranges=8).used_ranges) == 1
    assert len(Table.sparse("t", 100_000, width=64, ranges=8).used_ranges) == 8


@settings(max_examples=50)
@given(table=tables)
def test_an_empty_run_is_nowhere(table):
    assert list(table.pieces(0, 0)) == []
    assert list(table.pieces(table.rows, table.rows)) == []
    assert list(table.scattered(torch.tensor([], dtype=torch.int64))) == []


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 2), (0, 11), (11, 11)])
def test_runs_outside_are_refused_with_the_values(start, stop):
    table = Table("t", 10, 1, "float32", "add", 4, 3)
    with pytest.raises(UserError, match=rf"'t' has rows 0 to 9; {start} to {stop - 1} are not"):
        list(table.pieces(start, stop))


@pytest.mark.parametrize("rows", [[0, 10], [-1], [3, -1, 10]])
def test_lists_outside_are_refused_with_the_values(rows):
    table = Table("t", 10, 1, "float32", "add", 4, 3)
    with pytest.raises(UserError, match=f"0 to 9; {min(rows)} to {max(rows)} are not"):
        list(table.scattered(torch.tensor(rows)))


@settings(max_examples=50)
@given(table=tables, rounds=st.booleans(), backups=st.integers(0, 3))
def test_the_text_says_everything(table, rounds, backups):
    whole = Table(**{**vars(table), "rounds": rounds, "backups": backups})
    again = Table.from_json(whole.to_json())
    assert again == whole
    assert again.id == whole.id


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": 0},
        {"rows": "ten"},
        {"rows": 2.5},
        {"width": -1},
        {"block_rows": 0},
        {"ranges": 0},
        {"backups": -1},
        {"dtype": "float31"},
        {"name": 5},
        {"rule": None},
        {"colour": "red"},
    ],
)
def test_what_describes_no_table_is_refused(changes):
    good = json.loads(Table("t", 10, 1, "float32", "add", 4, 3).to_json())
    with pytest.raises(UserError, match=r"'t'|5|describes no table"):
        Table.from_json(json.dumps(good | changes))


@pytest.mark.parametrize("text", ["", "[]", "7", "null", "{}", '{"name": "t"}'])
def test_other_texts_are_refused(text):
    with pytest.raises(UserError, match="describes no table"):
        Table.from_json(text)


def test_a_wrong_dtype_names_the_nearest():
    with pytest.raises(UserError, match=r"float31.*float32"):
        Table.dense("t", 10, ranges=1, dtype="float31")

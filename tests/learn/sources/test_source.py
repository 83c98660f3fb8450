"""Rows in chunks, from memory and from files."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st

from farandole.learn.sources.files import ArrayFile, in_files
from farandole.learn.sources.source import CHUNK_BYTES, Source


def rows(count: int, columns: int = 3) -> np.ndarray:
    return np.arange(count * columns, dtype=np.float32).reshape(count, columns)


@given(st.integers(1, 40), st.integers(1, 50))
def test_chunks_have_every_row_once(count: int, chunk_rows: int) -> None:
    source = Source(rows(count), chunk_rows=chunk_rows)
    chunks = [source.read(number) for number in range(source.chunks)]
    assert np.array_equal(np.concatenate([chunk.X for chunk in chunks]), rows(count))
    assert [chunk.first for chunk in chunks] == list(range(0, count, chunk_rows))
    assert all(chunk.X.dtype == np.float64 for chunk in chunks)


def test_the_size_of_chunks_depends_on_the_columns_only() -> None:
    wide = Source(np.empty((10, 1 << 18), dtype=np.float32))
    assert wide.chunk_rows == CHUNK_BYTES // (8 << 18)
    assert Source(np.empty((5, 2 << 20), dtype=np.float32)).chunk_rows == 1


@pytest.mark.parametrize(("value", "name"), [(np.nan, "NaN"), (-np.inf, "infinity")])
@pytest.mark.parametrize("kind", [np.asarray, scipy.sparse.csr_array])
def test_what_is_not_finite_is_named_with_its_place(value: float, name: str, kind: type) -> None:
    data = rows(10).astype(float)
    data[7, 2] = value
    source = Source(kind(data), chunk_rows=4)
    source.read(0)
    with pytest.raises(ValueError, match=f"contains {name}: row 7, column 2.*chunk 1, its row 3"):
        source.read(1)


def test_values_whose_sum_is_not_finite_are_fine() -> None:
    assert Source(np.full((4, 2), 1e308)).read(0).rows == 4


@pytest.mark.parametrize("kind", ["dense", "sparse", "zeros", "fortran", "map", "part of a map"])
def test_files_hold_the_same_rows_and_travel_by_name(kind: str, tmp_path: Path) -> None:
    data = rows(11).astype(np.float64)
    table = data
    if kind == "sparse":
        table = scipy.sparse.csr_array(np.where(data % 2 == 0, data, 0))
        data = table.toarray()
    elif kind == "zeros":
        data = np.zeros((11, 3))
        table = scipy.sparse.csr_array(data)
    elif kind == "fortran":
        table = np.asfortranarray(data)
    elif "map" in kind:
        np.save(tmp_path / "rows.npy", np.vstack([data, data]))
        table = np.load(tmp_path / "rows.npy", mmap_mode="r")
        data = np.vstack([data, data])
        if kind == "part of a map":
            table, data = table[3:9], data[3:9]
    (tmp_path / "new").mkdir()
    y = np.array(["a", "bc"] * 11, dtype=object)[: len(data)]
    source = in_files(Source(table, y, chunk_rows=4), tmp_path / "new")
    assert len(pickle.dumps(source)) < 2000
    again = pickle.loads(pickle.dumps(source))
    for read in (source, again):
        chunks = [read.read(number) for number in range(read.chunks)]
        dense = [
            chunk.X if isinstance(chunk.X, np.ndarray) else chunk.X.toarray() for chunk in chunks
        ]
        assert np.array_equal(np.concatenate(dense), data)
        assert np.concatenate([chunk.y for chunk in chunks]).tolist() == y.tolist()
    # A map of a whole file is not written again.
    assert (kind == "map") == (
        isinstance(source.X, ArrayFile) and not (tmp_path / "new/X").exists()
    )


def test_a_number_of_rows_below_0_is_refused() -> None:
    with pytest.raises(ValueError, match="chunk_rows=-1"):
        Source(rows(3), chunk_rows=-1)

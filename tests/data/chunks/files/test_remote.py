"""Shards behind URLs: a real HTTP server, and fsspec's file systems for disks."""

from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import farandole as fd
from farandole.errors import DataError, UserError
from tests.support.web_files import WebFiles, serving


def write_tar(path: Path, numbers: range) -> None:
    with tarfile.open(path, "w") as file:
        for number in numbers:
            for suffix, data in {"cls": str(number).encode(), "jpg": b"x" * number}.items():
                info = tarfile.TarInfo(f"{number:04d}.{suffix}")
                info.size = len(data)
                file.addfile(info, io.BytesIO(data))


@pytest.fixture
def web(tmp_path: Path) -> Iterator[WebFiles]:
    (tmp_path / "served").mkdir()
    with serving(tmp_path / "served") as files:
        yield files


def test_every_sample_comes_over_http(web: WebFiles) -> None:
    write_tar(web.folder / "a-00.tar", range(10))
    write_tar(web.folder / "a-01.tar", range(10, 23))
    dataset = fd.data.shards(f"{web.url}/a-{{00..01}}.tar", window=2, chunk_bytes=5000)
    assert [dataset[at]["cls"] for at in range(len(dataset))] == list(range(23))
    copy = pickle.loads(pickle.dumps(dataset))  # as for a process of DataLoader's
    assert copy[22]["cls"] == 22


@pytest.mark.needs("pyarrow")
@pytest.mark.parametrize("suffix", ["jsonl", "txt", "parquet", "arrow"])
def test_formats_over_http(web: WebFiles, suffix: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = web.folder / f"a.{suffix}"
    table = pa.table({"n": list(range(9))})
    if suffix == "parquet":
        pq.write_table(table, path, row_group_size=4)
    elif suffix == "arrow":
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=4)
    else:
        path.write_text("".join(f'{{"n": {n}}}\n' for n in range(9)))
    dataset = fd.data.shards(f"{web.url}/a.{suffix}", chunk_bytes=20)
    found = [dataset[at] for at in range(len(dataset))]
    assert found == [f'{{"n": {n}}}' if suffix == "txt" else {"n": n} for n in range(9)]


@pytest.mark.parametrize("protocol", ["file", "local"])
def test_disks_through_fsspec(tmp_path: Path, protocol: str) -> None:
    write_tar(tmp_path / "0.tar", range(3))
    write_tar(tmp_path / "1.tar", range(3, 5))
    for pattern in ("*.tar", "{0,1}.tar"):
        dataset = fd.data.shards(f"{protocol}://{tmp_path}/{pattern}")
        assert [sample["cls"] for sample in dataset] == list(range(5))
    with pytest.raises(UserError, match="no file has such a name"):
        fd.data.shards(f"{protocol}://{tmp_path}/b*.tar")


def test_what_is_missing_changed_or_cut_short_is_named(web: WebFiles) -> None:
    with pytest.raises(DataError, match=r"shard web://.*/no\.tar cannot be read: there is no such"):
        fd.data.shards(f"{web.url}/no.tar")
    write_tar(web.folder / "a.tar", range(10))
    dataset = fd.data.shards(f"{web.url}/a.tar", window=1, chunk_bytes=2000)
    dataset[0]
    write_tar(web.folder / "a.tar", range(10))
    with pytest.raises(DataError, match=r"a\.tar has changed since the job began"):
        dataset[9]
    data = (web.folder / "a.tar").read_bytes()
    (web.folder / "a.tar").write_bytes(data[: 512 * 7 + 3])
    with pytest.raises(DataError, match=r"a\.tar"):
        fd.data.shards(f"{web.url}/a.tar")


def test_a_store_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere"):
        fd.data.shards("nowhere://bucket/a.tar")
    np.save(tmp_path / "a.npy", np.zeros((3, 2)))
    with pytest.raises(UserError, match=r"a\.npy: arrays are read from a path.*cache="):
        fd.data.shards(f"file://{tmp_path}/a.npy")

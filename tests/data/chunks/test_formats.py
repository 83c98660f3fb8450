"""Shards and arrays as real libraries write them."""

from __future__ import annotations

import io
import json
import os
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import farandole as fd
from farandole.errors import DataError, UserError

pytestmark = [pytest.mark.needs("h5py"), pytest.mark.needs("zarr"), pytest.mark.needs("pyarrow")]

ROWS = 23


def row(number: int) -> np.ndarray[Any, Any]:
    return np.arange(4, dtype=np.float32) + number


def write_tar(path: Path, numbers: range) -> None:
    with tarfile.open(path, "w") as file:
        for number in numbers:
            array = io.BytesIO()
            np.save(array, row(number))
            members = {
                "npy": array.getvalue(),
                "cls": str(number).encode(),
                "json": json.dumps({"n": number}).encode(),
                "jpg": bytes([number % 256]) * 9,
            }
            for suffix, data in members.items():
                info = tarfile.TarInfo(f"part/{number:05d}.{suffix}")
                info.size = len(data)
                file.addfile(info, io.BytesIO(data))


def write_parquet(path: Path, numbers: range) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(
        {"n": list(numbers), "text": [f"é{n}" for n in numbers], "maybe": [None] * len(numbers)}
    )
    pq.write_table(table, path, row_group_size=4)


def write_arrow(path: Path, numbers: range) -> None:
    import pyarrow as pa

    table = pa.table({"n": list(numbers), "v": [[n, n + 1] for n in numbers]})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)


def write_npy(path: Path, numbers: range) -> None:
    np.save(path, np.stack([row(n) for n in numbers]))


def write_safetensors(path: Path, numbers: range) -> None:
    x = torch.from_numpy(np.stack([row(n) for n in numbers]))
    save_file({"x": x, "n": torch.tensor(list(numbers))}, path)


def write_jsonl(path: Path, numbers: range) -> None:
    path.write_text("".join(json.dumps({"n": n, "é": "x" * n}) + "\n" for n in numbers) + "\n\n")


def write_txt(path: Path, numbers: range) -> None:
    path.write_text("\r\n".join(f"{n} é" + "x" * 20 for n in numbers))  # the last line has no end


FORMATS: dict[str, tuple[Callable[[Path, range], None], Callable[[Any], int]]] = {
    "tar": (write_tar, lambda s: int(s["cls"])),
    "parquet": (write_parquet, lambda s: int(s["n"])),
    "arrow": (write_arrow, lambda s: int(s["n"])),
    "npy": (write_npy, lambda s: int(s[0])),
    "safetensors": (write_safetensors, lambda s: int(s["n"])),
    "jsonl": (write_jsonl, lambda s: int(s["n"])),
    "txt": (write_txt, lambda s: int(s.split()[0])),
}


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_sample_of_every_shard(tmp_path: Path, suffix: str) -> None:
    write, number_of = FORMATS[suffix]
    write(tmp_path / f"a-00.{suffix}", range(10))
    write(tmp_path / f"a-01.{suffix}", range(10, ROWS))
    dataset = fd.data.shards(str(tmp_path / f"a-{{00..01}}.{suffix}"), window=2, chunk_bytes=100)
    assert len(dataset) == ROWS
    assert len(dataset.chunk_sizes) > 2
    assert [number_of(dataset[at]) for at in range(ROWS)] == list(range(ROWS))
    copy = pickle.loads(pickle.dumps(dataset))  # as for a process of DataLoader's
    assert number_of(copy[ROWS - 1]) == ROWS - 1
    with pytest.raises(IndexError):
        dataset[ROWS]


def test_what_is_in_a_sample(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", range(3))
    sample = fd.data.shards(tmp_path / "a.tar")[1]
    assert sample["__key__"] == "part/00001"
    assert (sample["cls"], sample["json"], sample["jpg"]) == (1, {"n": 1}, b"\x01" * 9)
    assert np.array_equal(sample["npy"], row(1))
    write_parquet(tmp_path / "a.parquet", range(3))
    assert fd.data.shards(tmp_path / "a.parquet")[2] == {"n": 2, "text": "é2", "maybe": None}
    write_arrow(tmp_path / "a.arrow", range(3))
    assert fd.data.shards(tmp_path / "a.arrow")[2] == {"n": 2, "v": [2, 3]}


def write_h5(path: Path) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        images = np.stack([row(n) for n in range(ROWS)])
        file.create_dataset("data/images", data=images, chunks=(3, 4), compression="gzip")
        file.create_dataset("labels", data=np.arange(ROWS))
        file.create_dataset("note", data=5)


def write_zarr(path: Path) -> None:
    import zarr

    group = zarr.open_group(str(path), mode="w")
    for name, data in {
        "data/images": np.stack([row(n) for n in range(ROWS)]),
        "labels": np.arange(ROWS),
    }.items():
        group.create_array(name, data=data, chunks=(3, *data.shape[1:]))


@pytest.mark.parametrize("suffix", ["h5", "zarr"])
def test_arrays_side_by_side(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    (write_h5 if suffix == "h5" else write_zarr)(path)
    pairs = fd.data.array(path, "data/images", "labels", chunk_bytes=100)
    assert all(size % 3 == 0 for size in pairs.chunk_sizes[:-1])  # whole chunks of the file
    for at in range(ROWS):
        image, label = pairs[at]
        assert label == at
        assert np.array_equal(image, row(at))
    assert pairs.chunks_read == len(pairs.chunk_sizes)
    single = fd.data.array(path, "labels", transform=lambda label: int(label) * 2)
    assert single[4] == 8
    with pytest.raises(UserError, match=r"has no array 'images'\. It has data/images, labels"):
        fd.data.array(path, "images")
    with pytest.raises(UserError, match=r"several arrays|single number"):
        fd.data.array(path)


def test_a_map_is_not_read_whole(tmp_path: Path) -> None:
    write_npy(tmp_path / "a.npy", range(ROWS))
    dataset = fd.data.array(tmp_path / "a.npy", chunk_bytes=100)
    assert len(dataset.chunk_sizes) > 2
    assert np.array_equal(dataset[20], row(20))
    assert dataset.chunks_read == 1


def test_arrays_that_do_not_belong_together(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(3, 2), "y": torch.zeros(4)}, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match=r"not as long as each other: \{'x': 3, 'y': 4\}"):
        fd.data.array(tmp_path / "a.safetensors", "x", "y")
    np.save(tmp_path / "0.npy", np.zeros((3, 2)))
    np.save(tmp_path / "1.npy", np.zeros((3, 2), dtype=np.float32))
    with pytest.raises(UserError, match=r"1\.npy.*float32 of shape \(2,\).*0\.npy it is float64"):
        fd.data.shards(str(tmp_path / "{0,1}.npy"))


# Bad input


def test_columns_of_another_kind_in_a_later_shard_are_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"x": [1, 2], "s": ["a", "b"]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"x": [1.0, 2.0], "s": ["a", "b"]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"s": ["a", "b"]}), tmp_path / "2.parquet")
    with pytest.raises(UserError, match=r"1.parquet, 'x' is double, and in .*0.* it is int64"):
        fd.data.shards(str(tmp_path / "{0,1}.parquet"))
    with pytest.raises(UserError, match=r"2.parquet, 'x' is missing"):
        fd.data.shards(str(tmp_path / "{0,2}.parquet"))


def write_arrays(path: Path, dtypes: list[str], field: str = "npy") -> None:
    with tarfile.open(path, "w") as file:
        for number, dtype in enumerate(dtypes):
            stream = io.BytesIO()
            np.save(stream, np.zeros(2, dtype))
            info = tarfile.TarInfo(f"{number}.{field}")
            info.size = len(stream.getvalue())
            file.addfile(info, io.BytesIO(stream.getvalue()))


def test_an_array_of_another_dtype_in_a_tar_is_named(tmp_path: Path) -> None:
    write_arrays(tmp_path / "0.tar", ["f4", "f4", "f8", "f4"])
    dataset = fd.data.shards(tmp_path / "0.tar")
    with pytest.raises(DataError, match=r"sample 2 of .*0.tar .*: 2.npy is float64, .* is float32"):
        dataset[2]
    assert dataset[3]["npy"].dtype == np.float32
    write_arrays(tmp_path / "1.tar", ["f8"])
    with pytest.raises(UserError, match=r"1.tar, 'npy' is float64, and in .*0.tar it is float32"):
        fd.data.shards(str(tmp_path / "{0,1}.tar"))
    write_arrays(tmp_path / "2.tar", ["f8"], "mask.npy")  # samples may have other fields
    assert len(fd.data.shards(str(tmp_path / "{0,2}.tar"))) == 5


def test_names_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no file has such a name"):
        fd.data.shards(str(tmp_path / "*.tar"))
    write_tar(tmp_path / "000000.tar", range(3))
    with pytest.raises(DataError, match=r"000001\.tar cannot be read: No such file"):
        fd.data.shards(str(tmp_path / "{000000..000002}.tar"))
    with pytest.raises(UserError, match="counts down"):
        fd.data.shards(str(tmp_path / "{3..1}.tar"))
    with pytest.raises(UserError, match=r"shards are \.tar, \.parquet"):
        fd.data.shards(tmp_path / "a.csv")
    with pytest.raises(UserError, match="cannot be read from the middle"):
        fd.data.shards(tmp_path / "a.tar.gz")


def test_empty_shards_are_fine_unless_all_are(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", range(0))
    with pytest.raises(UserError, match="none of the 1 shards holds a sample"):
        fd.data.shards(tmp_path / "0.tar")
    write_tar(tmp_path / "1.tar", range(5))
    assert len(fd.data.shards(str(tmp_path / "{0,1}.tar"))) == 5
    for suffix in ("jsonl", "txt"):
        (tmp_path / f"0.{suffix}").touch()
        FORMATS[suffix][0](tmp_path / f"1.{suffix}", range(5))
        assert len(fd.data.shards(str(tmp_path / f"{{0,1}}.{suffix}"))) == 5


@pytest.mark.parametrize("suffix", ["tar", "parquet", "arrow", "npy", "safetensors"])
def test_a_shard_that_is_cut_short_is_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    FORMATS[suffix][0](path, range(ROWS))
    os.truncate(path, path.stat().st_size * 2 // 3)
    with pytest.raises(DataError, match=rf"a\.{suffix}"):
        list(fd.data.shards(path))


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_shard_that_changes_under_the_job_is_refused(tmp_path: Path, suffix: str) -> None:
    write, _ = FORMATS[suffix]
    path = tmp_path / f"a.{suffix}"
    write(path, range(ROWS))
    dataset = fd.data.shards(path, window=1, chunk_bytes=100)
    dataset[0]
    write(path, range(9))
    with pytest.raises(DataError, match=rf"sample {ROWS - 1} of .*a\.{suffix}.*"):
        dataset[ROWS - 1]


def test_a_shard_that_changes_is_no_bad_sample(tmp_path: Path) -> None:
    path = tmp_path / "0.tar"
    write_tar(path, range(40))
    dataset = fd.data.shards(path, on_error="skip")
    assert dataset[0]["cls"] == 0  # the chunk is at hand, and its file open
    with path.open("r+b") as file:
        file.truncate(8192)
    with pytest.raises(
        DataError, match=r"sample 39 of .*0.tar has changed since the job began: it"
    ):
        dataset[39]


def test_many_open_files_leave_chunks_to_be_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tar(tmp_path / "0.tar", range(40))
    monkeypatch.setattr("farandole.data.chunks.files.local_part._HIGHEST_DESCRIPTOR", -1)
    dataset = fd.data.shards(tmp_path / "0.tar")
    assert [sample["cls"] for sample in map(dataset.__getitem__, range(40))] == list(range(40))


def test_an_array_of_the_same_shape_in_its_place_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((ROWS, 4)))
    dataset = fd.data.array(tmp_path / "a.npy", window=1, chunk_bytes=100)
    dataset[0]
    np.save(tmp_path / "a.npy", np.ones((ROWS, 4)))
    with pytest.raises(DataError, match=r"a\.npy has changed since the job began"):
        dataset[ROWS - 1]


def test_files_of_a_sample_that_stand_apart_are_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as file:
        for name in ("0.cls", "1.cls", "0.jpg", "1.jpg"):
            file.addfile(tarfile.TarInfo(name))
    with pytest.raises(DataError, match=r"the files of sample '0' do not stand together"):
        fd.data.shards(tmp_path / "a.tar")


def test_a_sample_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n{"n": \n')
    dataset = fd.data.shards(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"sample 1 of .*a\.jsonl .*the line cannot be decoded"):
        dataset[1]
    wrong = fd.data.shards(tmp_path / "a.jsonl", transform=lambda sample: sample["m"])
    with pytest.raises(DataError, match=r"sample 0 of .*a\.jsonl .*KeyError: 'm'"):
        wrong[0]


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="Python objects"):
        fd.data.shards(tmp_path / "a.npy")

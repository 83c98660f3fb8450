"""The cache of shards: whole copies, within its limit, shared, and safe after a kill."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

import farandole as fd
from farandole.data.chunks.files import cache as cache_module
from farandole.data.chunks.files.cache import ShardCache
from farandole.data.chunks.source import FileStamp
from farandole.errors import DataError, UserError
from tests.support.web_files import WebFiles, serving

PATIENCE_SECONDS = 200.0
fork = multiprocessing.get_context("fork")


@pytest.fixture
def web(tmp_path: Path) -> Iterator[WebFiles]:
    (tmp_path / "served").mkdir()
    with serving(tmp_path / "served") as files:
        yield files


def write_lines(folder: Path, shards: int = 3) -> None:
    for shard in range(shards):
        text = "".join(f"{shard * 10 + line:04d}\n" for line in range(10))
        (folder / f"{shard}.txt").write_text(text)


def copies(folder: Path) -> list[Path]:
    return sorted((folder / "data").iterdir())


def read_all(url: str, folder: Path, limit: int | None = None) -> list[int]:
    dataset = fd.data.shards(url, cache=folder, cache_limit=limit, chunk_bytes=20)
    return [int(sample) for sample in dataset]


def test_a_shard_is_copied_once_for_all(web: WebFiles, tmp_path: Path) -> None:
    write_lines(web.folder)
    url, folder = f"{web.url}/{{0..2}}.txt", tmp_path / "cache"
    assert read_all(url, folder) == list(range(30))
    assert len(copies(folder)) == 3
    reads = dict(web.reads)
    assert read_all(url, folder) == list(range(30))  # the next job
    assert dict(web.reads) == reads


def test_what_was_not_used_for_longest_goes(web: WebFiles, tmp_path: Path) -> None:
    write_lines(web.folder)
    folder = tmp_path / "cache"
    for shard in (0, 1, 0, 2):
        assert read_all(f"{web.url}/{shard}.txt", folder, limit=100) == [
            shard * 10 + line for line in range(10)
        ]
    assert sorted(copy.read_text()[:4] for copy in copies(folder)) == ["0000", "0020"]
    # An epoch over more than it holds works too: shards come and go.
    assert read_all(f"{web.url}/{{0..2}}.txt", folder, limit=100) == list(range(30))


def test_what_is_open_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lines(tmp_path, 2)
    monkeypatch.setattr(cache_module, "ROOM_SECONDS", 0.1)
    cache = ShardCache(tmp_path / "cache", limit=60)
    first, second = (FileStamp.of(tmp_path / f"{shard}.txt") for shard in range(2))
    with cache.held(first) as copy:
        assert copy is not None
        with (
            pytest.warns(UserWarning, match=r"1\.txt is not cached.*all copies in .* in use"),
            cache.held(second) as other,
        ):
            assert other is None
        assert copy.read_text().startswith("0000")
    with cache.held(second) as other:
        assert other is not None
    assert copies(cache.folder) == [other]


def test_arrays_are_read_from_their_copy(web: WebFiles, tmp_path: Path) -> None:
    np.save(web.folder / "0.npy", np.arange(12.0).reshape(6, 2))
    np.save(web.folder / "1.npy", np.arange(12.0, 20.0).reshape(4, 2))
    dataset = fd.data.shards(
        f"{web.url}/{{0,1}}.npy", cache=tmp_path / "c", cache_limit=230, window=1, chunk_bytes=40
    )
    for _ in range(2):  # there is room for one of them at a time
        assert [row[0] for row in dataset] == [2.0 * at for at in range(10)]


@pytest.mark.parametrize("damage", ["size", "checksum"])
def test_a_damaged_copy_is_made_again(web: WebFiles, tmp_path: Path, damage: str) -> None:
    write_lines(web.folder, 1)
    url, folder = f"{web.url}/0.txt", tmp_path / "cache"
    read_all(url, folder)
    (copy,) = copies(folder)
    copy.write_text("12345" if damage == "size" else "9" * 50)
    with pytest.warns(UserWarning, match=rf"0\.txt is damaged: its {damage} is wrong"):
        assert read_all(url, folder) == list(range(10))


def test_a_file_that_was_written_again_is_fetched_again(web: WebFiles, tmp_path: Path) -> None:
    write_lines(web.folder, 1)
    url, folder = f"{web.url}/0.txt", tmp_path / "cache"
    read_all(url, folder)
    (web.folder / "0.txt").write_text("".join(f"{line:04d}\n" for line in range(50, 60)))
    assert read_all(url, folder) == list(range(50, 60))


def test_a_file_that_changes_under_the_job_is_refused(web: WebFiles, tmp_path: Path) -> None:
    write_lines(web.folder, 2)
    dataset = fd.data.shards(
        f"{web.url}/{{0,1}}.txt", cache=tmp_path / "cache", cache_limit=60, window=1, chunk_bytes=5
    )
    assert len(list(dataset)) == 20  # and the copy of 0.txt is gone
    write_lines(web.folder, 1)
    with pytest.raises(DataError, match=r"sample 0 of web://.*0\.txt has changed since the job"):
        dataset[0]


def test_a_full_disk_is_said_and_read_around(
    web: WebFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(web.folder, 1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache_module.os, "posix_fallocate", full)
    with pytest.warns(UserWarning, match=r"0\.txt is not cached: .*cache: No space left on device"):
        assert read_all(f"{web.url}/0.txt", tmp_path / "cache") == list(range(10))
    assert copies(tmp_path / "cache") == []


def test_a_full_disk_makes_room_first(
    web: WebFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(web.folder, 2)
    folder = tmp_path / "cache"

    def nearly_full(*_: object) -> None:
        if len(copies(folder)) > 1:  # one, and the one that is being made
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache_module.os, "posix_fallocate", nearly_full)
    for shard in range(2):
        assert len(read_all(f"{web.url}/{shard}.txt", folder)) == 10
    assert [copy.read_text()[:4] for copy in copies(folder)] == ["0010"]


def test_processes_share_one_copy(web: WebFiles, tmp_path: Path) -> None:
    write_lines(web.folder)
    url, folder = f"{web.url}/{{0..2}}.txt", tmp_path / "cache"

    def job(limit: int | None) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of room that others have
            assert read_all(url, folder, limit) == list(range(30))

    jobs = [fork.Process(target=job, args=(limit,)) for limit in (None, None, 110, 110)]
    for each in jobs:
        each.start()
    for each in jobs:
        each.join(PATIENCE_SECONDS)
    assert [each.exitcode for each in jobs] == [0] * 4
    assert not [copy for copy in copies(folder) if copy.name.startswith(".")]


class SlowFile(FileStamp):
    """Never comes to its end."""

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        with super().opened() as file:
            yield file
            time.sleep(PATIENCE_SECONDS)


def test_what_a_killed_process_leaves_is_removed(tmp_path: Path) -> None:
    write_lines(tmp_path, 2)
    cache = ShardCache(tmp_path / "cache", limit=60)

    def copy_for_ever() -> None:
        with cache.held(SlowFile.of(tmp_path / "0.txt")):
            pass

    job = fork.Process(target=copy_for_ever)
    job.start()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not copies(cache.folder) and time.monotonic() < deadline:
        time.sleep(0.01)
    (half,) = copies(cache.folder)
    assert half.name.startswith(".")
    os.kill(job.pid or 0, signal.SIGKILL)
    job.join(PATIENCE_SECONDS)
    with cache.held(FileStamp.of(tmp_path / "1.txt")) as copy:
        assert copy is not None
    assert copies(cache.folder) == [copy]  # there was no room for both
    with cache.held(FileStamp.of(tmp_path / "0.txt")) as copy:
        assert copy is not None
        assert copy.read_text().startswith("0000")


def test_arguments_that_cannot_work(tmp_path: Path) -> None:
    write_lines(tmp_path, 1)
    pattern = str(tmp_path / "0.txt")
    with pytest.raises(UserError, match="needs cache="):
        fd.data.shards(pattern, cache_limit=5)
    with pytest.raises(UserError, match="cache_limit=0"):
        fd.data.shards(pattern, cache=tmp_path, cache_limit=0)
    with pytest.raises(UserError, match="a folder on a local disk"):
        fd.data.shards(pattern, cache="s3://bucket/cache")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be used"):
        fd.data.shards(pattern, cache=tmp_path / "file")
    with pytest.warns(UserWarning, match=r"50 bytes are more than cache_limit=7"):
        assert len(fd.data.shards(pattern, cache=tmp_path / "small", cache_limit=7)) == 10

"""Chunks are read in the background, each once, and never more of them than there is room for."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import farandole as fd
from farandole.data.chunks.dataset import ChunkedDataset
from farandole.data.chunks.plan import PlannedBatch
from farandole.data.chunks.read_ahead import ChunkReader
from farandole.data.chunks.source import ChunkSource
from farandole.errors import DataError, UserError


class Counting(ChunkSource):
    """Remembers who read what; an optional chunk cannot be read."""

    name = "counting"

    def __init__(self, chunks: int, size: int, broken: int | None = None) -> None:
        self.sizes = [size] * chunks
        self.broken = broken
        self.threads: list[int] = []

    def read(self, chunk: int) -> Sequence[Any]:
        self.threads.append(threading.get_ident())
        if chunk == self.broken:
            raise OSError("the disk is gone")
        first = chunk * self.sizes[0]
        return list(range(first, first + self.sizes[0]))


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("processes", [0, 2])
def test_an_epoch_reads_every_chunk_once(
    ahead: int, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = Counting(20, 7)
    dataset = ChunkedDataset([source], window=4, ahead=ahead)
    run = fd.init()
    loader = run.loader(dataset, batch_size=5, num_workers=processes)
    for _ in range(2):
        seen = [int(n) for batch in loader for n in batch]
        assert sorted(seen) == list(range(140))
    if not processes:
        assert dataset.chunks_read == 40
        assert (threading.get_ident() in source.threads) == (ahead == 0)
    run.close()


def test_there_are_never_more_chunks_than_there_is_room_for() -> None:
    read: list[int] = []

    def reading(chunk: int, following: int | None) -> Sequence[Any]:
        read.append(chunk)
        return [chunk]

    reader = ChunkReader(reading, window=2, ahead=1)
    batch = PlannedBatch([])
    batch.begins, batch.coming = True, [(chunk, 2) for chunk in range(6)]
    reader.expect(batch)
    reader.settle()
    assert read == [0, 1, 2]  # as many as there is room for
    assert reader.take(0) == [0]
    reader.settle()
    assert read == [0, 1, 2]  # it is used once more
    reader.take(0)
    reader.settle()
    assert read == [0, 1, 2, 3]  # now it has gone
    assert reader.take(5) == [5]  # not expected so early: another one goes
    assert reader.take(1) == [1]
    again = PlannedBatch([])
    again.begins, again.coming = True, [(9, 1)]
    reader.expect(again)
    reader.settle()
    assert read[-1] == 9
    assert reader.take(9) == [9]


def test_an_error_in_the_background_names_the_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = fd.init()
    loader = run.loader(ChunkedDataset([Counting(9, 3, broken=4)], window=2), batch_size=3)
    with pytest.raises(DataError, match=r"sample 1[234] of counting .*the disk is gone"):
        list(loader)
    run.close()


def test_a_fork_waits_for_what_is_being_read_and_reads_on_its_own() -> None:
    dataset = ChunkedDataset([Counting(4, 2)], window=2)
    batch = PlannedBatch([0])
    batch.begins, batch.coming = True, [(chunk, 2) for chunk in range(4)]
    dataset.__getitems__(batch)
    child = os.fork()
    if child == 0:
        os._exit(0 if dataset[7] == 7 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_memory_bounds_the_chunks_of_an_array(tmp_path: Path) -> None:
    path = tmp_path / "rows.npy"
    np.save(path, np.zeros((1000, 16), dtype=np.float32))  # 64 bytes a row
    some = fd.data.array(path, chunk_bytes=640, memory_bytes=12_800)
    assert (some.window, some.ahead) == (16, 4)
    few = fd.data.array(path, chunk_bytes=640, memory_bytes=1_300)
    assert (few.window, few.ahead) == (1, 1)
    with pytest.raises(UserError, match=r"chunks of 640 bytes.*memory_bytes=1000.* Give 1280"):
        fd.data.array(path, chunk_bytes=640, memory_bytes=1000)
    with pytest.raises(UserError, match="Give 6400 or more"):
        fd.data.array(path, chunk_bytes=640, memory_bytes=2560, window=9)
    with pytest.raises(UserError, match="ahead=-1"):
        ChunkedDataset([Counting(1, 1)], ahead=-1)
    assert torch.as_tensor(few[999]).shape == (16,)

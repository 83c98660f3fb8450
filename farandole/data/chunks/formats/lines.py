"""Text and JSONL: a sample is a line; empty lines at the end of a file are none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np

from farandole.data.chunks.files.shard_file import ShardFile
from farandole.data.chunks.source import CHUNK_BYTES, ChunkSource, runs
from farandole.errors import DataError


class Lines(ChunkSource):
    """One file. Its lines are counted once, when it is made."""

    def __init__(self, file: ShardFile, chunk_bytes: int, *, is_json: bool) -> None:
        self.name = file.name
        self._file = file
        self._is_json = is_json
        with file.opened() as opened:
            ends = _line_ends(opened, file.size)
        self.sizes = runs(ends, chunk_bytes)
        last = np.cumsum(self.sizes, dtype=np.int64) - 1
        stops = [ends[at] for at in last]
        self._ranges = list(zip([0, *stops][:-1], stops, strict=True))

    def read(self, chunk: int) -> Sequence[Any]:
        lines = self._file.read(*self._ranges[chunk]).split(b"\n")[: self.sizes[chunk]]
        return _Decoded(lines, is_json=self._is_json)


class _Decoded(Sequence[Any]):
    def __init__(self, lines: list[bytes], *, is_json: bool) -> None:
        self._lines = lines
        self._is_json = is_json

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, row: Any) -> Any:
        line = self._lines[row].rstrip(b"\r")
        try:
            return json.loads(line) if self._is_json else line.decode()
        except ValueError as error:
            raise DataError(f"the line cannot be decoded: {error}") from error


def _line_ends(file: BinaryIO, size: int) -> list[int]:
    """The byte after each line."""
    found: list[int] = []
    at, blank = 0, True
    while piece := file.read(CHUNK_BYTES):
        breaks = np.flatnonzero(np.frombuffer(piece, dtype=np.uint8) == ord("\n"))
        found += (breaks + at + 1).tolist()
        at += len(piece)
    if size > (found[-1] if found else 0):
        found.append(size)  # the last line has no end
    while found and blank:  # lines at the end that hold nothing
        start = found[-2] if len(found) > 1 else 0
        file.seek(start)
        blank = not file.read(found[-1] - start).strip()
        if blank:
            found.pop()
    return found

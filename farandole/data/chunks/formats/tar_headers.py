"""Where the files of a tar are. `tarfile` finds that out too, in several times the time.

Shards hold nothing but plain files, with names of at most 255 bytes: their headers are read here.
Whatever else a tar may hold (long names, links, sparse files, damage) is left to `tarfile`.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import BinaryIO, Final, NamedTuple

from farandole.errors import DataError

_BLOCK: Final = tarfile.BLOCKSIZE
_END: Final = bytes(_BLOCK)
_FILES: Final = (b"0", b"\0")
_FOLDER: Final = b"5"


class TarMember(NamedTuple):
    name: str
    start: int
    stop: int


def members(file: BinaryIO) -> list[TarMember]:
    """Of its plain files. Raises `tarfile.TarError` or `DataError` for what is no whole tar."""
    found = _plain_members(file)
    if found is None:
        file.seek(0)
        found = list(_all_members(file))
    return found


def _plain_members(file: BinaryIO) -> list[TarMember] | None:
    """None if there is anything that is not understood here."""
    found: list[TarMember] = []
    at = 0
    while True:
        file.seek(at)
        header = file.read(_BLOCK)
        if header == _END:
            return found
        kind = header[156:157]
        if len(header) < _BLOCK or (kind not in _FILES and kind != _FOLDER) or header[124] & 0x80:
            return None
        try:
            size = int(header[124:136].strip(b"\0 ") or b"0", 8)
            checksum = int(header[148:156].strip(b"\0 "), 8)
        except ValueError:
            return None
        if checksum != sum(header) - sum(header[148:156]) + 8 * ord(" "):
            return None
        name, prefix = (header[part].partition(b"\0")[0] for part in (_NAME, _PREFIX))
        if kind in _FILES and not name.endswith(b"/"):
            path = prefix + b"/" + name if prefix else name
            start = at + _BLOCK
            found.append(TarMember(path.decode("utf-8", "surrogateescape"), start, start + size))
        at += _BLOCK + -(-size // _BLOCK) * _BLOCK


_NAME, _PREFIX = slice(0, 100), slice(345, 500)


def _all_members(file: BinaryIO) -> Iterator[TarMember]:
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for info in tar:
            if info.issparse():
                raise DataError(f"{info.name} is a sparse file. Pack it again")
            if info.isfile():
                yield TarMember(info.name, info.offset_data, info.offset_data + info.size)
        # tarfile takes what is no header, or half of one, for the end. The end is a block of zeros.
        file.seek(tar.offset)
        if file.read(_BLOCK) != _END:
            raise DataError(
                f"it is cut short or damaged: there is no end of the archive at byte {tar.offset}"
            )

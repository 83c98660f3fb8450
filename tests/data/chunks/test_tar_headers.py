"""Headers of tars are read as `tarfile` reads them."""

from __future__ import annotations

import io
import tarfile

import pytest

from farandole.data.chunks.formats.tar_headers import members
from farandole.errors import DataError


def packed(names: dict[str, int], form: int) -> io.BytesIO:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form) as file:
        for name, size in names.items():
            info = tarfile.TarInfo(name)
            if name.endswith("/"):
                info.type = tarfile.DIRTYPE
            info.size = size
            file.addfile(info, io.BytesIO(b"x" * size))
    stream.seek(0)
    return stream


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize(
    "names",
    [
        {},
        {"a.cls": 1, "a.jpg": 1000, "b.cls": 0},
        {"part/": 0, "part/a.cls": 512, "part/b.cls": 513},
        {"f" * 90 + "/" + "n" * 80 + ".jpg": 5, "é.txt": 3},
    ],
)
def test_the_same_files_at_the_same_places(names: dict[str, int], form: int) -> None:
    stream = packed(names, form)
    with tarfile.open(fileobj=io.BytesIO(stream.getvalue())) as file:
        expected = [(i.name, i.offset_data, i.offset_data + i.size) for i in file if i.isfile()]
    assert members(stream) == expected
    assert len(expected) == sum(not name.endswith("/") for name in names)


def test_damage_in_the_middle_is_no_end() -> None:
    data = bytearray(packed({"a.cls": 5, "b.cls": 5}, tarfile.USTAR_FORMAT).getvalue())
    for at, byte in ((1024 + 3, 1), (1024 + 124, 255)):
        damaged = bytearray(data)
        damaged[at] ^= byte
        with pytest.raises(DataError, match="no end of the archive at byte 1024"):
            members(io.BytesIO(damaged))
    for length in (1024, 1100, 1024 + 512):
        with pytest.raises((DataError, tarfile.TarError)):
            members(io.BytesIO(data[:length]))

"""Names of Unix sockets: the kernel takes 107 bytes, and temporary folders may be deep."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_LONGEST = 107  # on Linux; macOS takes 103
_SHORT = 100
_DESCRIPTORS = Path("/proc/self/fd")


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """A name of `path` that is short enough, as long as the context lasts. Raises `OSError`."""
    if len(os.fsencode(path)) <= _SHORT:
        yield str(path)
        return
    if not _DESCRIPTORS.exists():
        raise OSError(
            f"{path} is longer than a socket's name may be ({_LONGEST} bytes). Set TMPDIR to a "
            "folder with a shorter path."
        )
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"{_DESCRIPTORS}/{folder}/{path.name}"
    finally:
        os.close(folder)

"""Writing a file so that a reader sees the old one or the new one, and never half of either."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from farandole.errors import FarandoleError


def write_whole(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write to a temporary name beside `path`, sync, rename. Only its owner can use a private file.

    Raises `FarandoleError` when the folder cannot be written or the disk is full; the file that
    was at `path` before is then still there, and the temporary one is gone.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        mode = 0o600 if private else 0o666  # less what the umask takes away
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise FarandoleError(
            f"could not write {path}: {error.strerror or error}. Make room or choose another "
            "folder, and write it again: what was there before is untouched."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()

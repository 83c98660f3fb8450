"""Writing a file so that a reader sees the old one or the new one, and never half of either."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from farandole.errors import FarandoleError


def write_whole(path: Path, content: bytes) -> None:
    """Write to a temporary name beside `path`, sync, rename.

    Raises `FarandoleError` when the folder cannot be written or the disk is full; the file that
    was at `path` before is then still there, and the temporary one is gone.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise FarandoleError(
            f"could not write {path}: {error.strerror or error}. Make room or choose another "
            "folder and write the report again: the metrics it is drawn from are untouched."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()

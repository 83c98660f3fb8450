"""Files behind URLs, through fsspec: telling a URL from a path, and opening its file system.

fsspec is imported only where a URL is given.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from farandole.errors import UserError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_URL: Final = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)  # one letter: a drive of Windows


def is_url(place: str | Path | None) -> bool:
    """A `Path` never is one: it has lost a slash."""
    return isinstance(place, str) and _URL.match(place) is not None


def open_url(url: str) -> tuple[AbstractFileSystem, str]:
    """The file system, and the path in it. fsspec keeps one for each process and store."""
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise UserError(
            f"{url}: object stores are reached through fsspec, which is not installed. "
            "Get it with: pip install 'farandole[objects]'"
        ) from None
    protocol = url.partition("://")[0]
    try:
        files, root = url_to_fs(url)
    except ImportError as error:  # it names the package
        raise UserError(
            f"{url}: the package for {protocol}:// is not installed: {error}. Install it with pip, "
            "such as s3fs for s3:// or gcsfs for gs://."
        ) from None
    except ValueError as error:
        raise UserError(f"{url} is no URL of an object store: {error}.") from None
    return files, str(root)

"""Tells a URL of an object store from the path of a folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_URL: Final = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)  # one letter: a drive of Windows


def is_url(place: str | Path | None) -> bool:
    """A `Path` never is one: it has lost a slash."""
    return isinstance(place, str) and _URL.match(place) is not None

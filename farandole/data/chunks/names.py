"""From a pattern to names of files: braces, `*` and `?`, on disks and behind URLs."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Sequence

from farandole.errors import DataError, UserError
from farandole.urls import is_url, open_url

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def expanded(pattern: str) -> list[str]:
    """Raises `UserError` for a pattern that matches nothing."""
    found: list[str] = []
    for name in _without_braces(pattern):
        if not (_has_url_magic(name) if is_url(name) else glob.has_magic(name)):
            found.append(name)
            continue
        matches = _remote_matches(name) if is_url(name) else glob.glob(name, recursive=True)  # noqa: PTH207  (of any root)
        if not matches:
            raise UserError(f"{name}: no file has such a name.")
        found += sorted(matches)
    return found


def _has_url_magic(url: str) -> bool:
    """A `?` begins the query of a URL, and stands for nothing."""
    return "*" in url or "[" in url


def _remote_matches(url: str) -> list[str]:
    files, path = open_url(url)
    try:
        return [str(files.unstrip_protocol(match)) for match in files.glob(path)]
    except Exception as error:  # of the store's package
        raise DataError(f"{url} cannot be listed: {type(error).__name__}: {error}.") from error


def _without_braces(pattern: str) -> Iterator[str]:
    """As a shell expands them."""
    braces = _BRACES.search(pattern)
    if braces is None:
        yield pattern
        return
    before, after = pattern[: braces.start()], pattern[braces.end() :]
    numbers = _RANGE.fullmatch(braces[1])
    if numbers is not None:
        first, last = numbers[1], numbers[2]
        if int(first) > int(last):
            raise UserError(f"{pattern}: {{{braces[1]}}} counts down.")
        inner: Sequence[str] = [
            str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)
        ]
    else:
        inner = braces[1].split(",")
    for each in inner:
        yield from _without_braces(before + each + after)

"""What the command prints never fails, whatever the locale and the names of files are.

A name may hold bytes that are no characters in this locale; they are printed as they are. Under a
locale such as POSIX, a character of ours may have no bytes; it is printed as `?`.
"""

from __future__ import annotations

import codecs
import io
import sys

_HANDLER = "farandole"


def print_any_character() -> None:
    codecs.register_error(_HANDLER, _bytes_of)
    if isinstance(sys.stdout, io.TextIOWrapper):  # standard error escapes by itself
        sys.stdout.reconfigure(errors=_HANDLER)


def _bytes_of(error: UnicodeError) -> tuple[bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    found = error.object[error.start : error.end]
    escaped = (ord(character) - 0xDC00 for character in found)  # as `os.fsdecode` has it
    return bytes(byte if 0x80 <= byte <= 0xFF else ord("?") for byte in escaped), error.end

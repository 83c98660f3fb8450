"""Numbers of bytes as people write them: `4KiB`, `64MiB`, a range `4KiB:64MiB`, and back."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

from farandole.errors import UserError

_UNITS: Final = {
    "B": 1,
    "kB": 10**3, "MB": 10**6, "GB": 10**9,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30,
}  # fmt: skip
_RANGE_FACTOR = 4
_HOW = "Write a number and a unit (B, KiB, MiB, GiB; kB, MB, GB are powers of 1000), such as 64KiB"


def parse_size(text: str) -> int:
    """`4KiB`, `1.5 MiB` or `4096` in bytes. Raises `UserError` for what is no whole number."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(found[2] or "B") if found else None
    if found is None or unit is None:
        raise UserError(f"{text.strip()!r} is not a size. {_HOW}.")
    count = Decimal(found[1]) * unit
    if count != count.to_integral_value() or count < 1:
        raise UserError(f"{text.strip()!r} is not a whole number of bytes, 1 or more. {_HOW}.")
    return int(count)


def parse_sizes(text: str) -> tuple[int, ...]:
    """`4KiB:64MiB` (each four times the one before, both ends included) or `4KiB,1MiB,64MiB`.

    The sizes in bytes, each once, from the smallest to the largest.
    """
    first, colon, last = text.partition(":")
    if not colon:
        return tuple(sorted({parse_size(part) for part in text.split(",")}))
    low, high = parse_size(first), parse_size(last)
    if low > high:
        raise UserError(f"sizes {text!r} go from large to small. Write {last}:{first}.")
    sizes = []
    while low < high:
        sizes.append(low)
        low *= _RANGE_FACTOR
    return (*sizes, high)


def format_size(count: int) -> str:
    """Exactly `count` bytes, in the largest binary unit that divides it: `4 KiB`, `1000 B`."""
    for unit in ("GiB", "MiB", "KiB"):
        if count and count % _UNITS[unit] == 0:
            return f"{count // _UNITS[unit]} {unit}"
    return f"{count} B"

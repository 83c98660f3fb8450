"""Times and numbers of steps, as users write and read them: `90s`, `10min`, `1.5h`, `500steps`."""

from __future__ import annotations

import math
import re
from typing import Final

from farandole.errors import UserError

_UNITS: Final = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_WORDS: Final = {
    "s": "s", "sec": "s", "second": "s", "seconds": "s",
    "m": "min", "min": "min", "minute": "min", "minutes": "min",
    "h": "h", "hour": "h", "hours": "h",
    "d": "d", "day": "d", "days": "d",
}  # fmt: skip
_STEPS: Final = ("step", "steps")
_FORM: Final = re.compile(r"([0-9]*\.?[0-9]+)\s*([a-z]+)")


def read_seconds(what: str, text: str) -> float:
    """`10min` in seconds. Raises `UserError`, which names `what`."""
    amount, unit = _parted(what, text, "such as 90s, 10min or 6h")
    if unit not in _WORDS:
        raise UserError(f"{what}={text!r}: {unit!r} is no unit of time. Use s, min, h or d.")
    seconds = amount * _UNITS[_WORDS[unit]]
    if not 0 < seconds < math.inf:
        raise UserError(f"{what}={text!r} must be a time above 0.")
    return seconds


def read_interval(what: str, text: str) -> float | int:
    """Seconds as a float, or steps as an int. Raises `UserError`, which names `what`."""
    amount, unit = _parted(what, text, "such as 10min, 300s or 500steps")
    if unit not in _STEPS:
        return read_seconds(what, text)
    if amount < 1 or amount != int(amount):
        raise UserError(f"{what}={text!r}: give a whole number of steps, 1 or more.")
    return int(amount)


def write_seconds(seconds: float) -> str:
    """In the largest unit that it is a whole number of, as `read_seconds` reads it."""
    for unit in ("d", "h", "min"):
        if seconds >= _UNITS[unit] and seconds % _UNITS[unit] == 0:
            return f"{seconds / _UNITS[unit]:.0f}{unit}"
    return f"{seconds:.12g}s"


def show_seconds(seconds: float) -> str:
    """Rounded, for people: `0.25 s`, `3 min 20 s`, `5.2 h`."""
    if seconds < 100:
        return f"{seconds:.2g} s"
    if seconds < 3600:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    return f"{seconds / 3600:.3g} h" if seconds < 2 * 86400 else f"{seconds / 86400:.3g} days"


def _parted(what: str, text: str, examples: str) -> tuple[float, str]:
    found = _FORM.fullmatch(text.strip().lower())
    if found is None:
        raise UserError(f"{what}={text!r}: write a number with its unit, {examples}.")
    return float(found[1]), found[2]

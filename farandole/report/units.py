"""Numbers as people read them: the same text in the table, the page and the plots."""

from __future__ import annotations

import math

NONE = "–"


def seconds(value: float | None) -> str:
    if value is None:
        return NONE
    if value < 0.995:
        return f"{value:.2g} s"
    if value < 59.95:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(value / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def memory(value: float | None) -> str:
    """In powers of 1024, as the sizes of memories are quoted."""
    return NONE if value is None else f"{value / 2**30:.3g} GiB"


def bytes_count(value: float | None) -> str:
    """In powers of 1000, as network rates are quoted."""
    if value is None:
        return NONE
    if value < 1000:
        return f"{value:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        value /= 1000
        if value < 999.5:
            return f"{value:.3g} {unit}"
    return f"{value / 1000:.4g} PB"


def joules(value: float | None) -> str:
    if value is None:
        return NONE
    if value < 999.5:
        return f"{value:.3g} J"
    for unit in ("kJ", "MJ"):
        value /= 1000
        if value < 999.5:
            return f"{value:.3g} {unit}"
    return f"{value / 1000:,.3g} GJ"


def money(value: float | None) -> str:
    """In the unit in which the price was given."""
    if value is None:
        return NONE
    return f"{value:,.2f}" if value >= 10 else f"{value:.3g}"


def number(value: float | None) -> str:
    """Four significant digits, which is more than one run can promise."""
    return NONE if value is None else f"{value:.4g}"


def rate(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def share(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.1f} %"


def times(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:,.0f}×" if value >= 100 else f"{value:.2f}×"


def jsonable(value: float | None) -> float | str | None:
    """JSON has no NaN or infinity: they are written as in `metrics.jsonl`, as strings."""
    return value if value is None or math.isfinite(value) else str(value)

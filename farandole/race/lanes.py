"""The lanes of a race, from what the user typed."""

from __future__ import annotations

from collections.abc import Sequence

from farandole.errors import UserError
from farandole.launch.servers import needs_servers
from farandole.race.runner import Entry
from farandole.sync import parse
from farandole.sync.registry import STRATEGIES
from farandole.train.settings import read_layout

_BETWEEN = "·/"


def all_entries(layouts: Sequence[str], syncs: Sequence[str], workers: int) -> list[Entry]:
    """Every layout with every strategy, as typed. What is not given is left to the script."""
    if not layouts and not syncs:
        return []
    strategies: list[tuple[str | None, bool]] = [
        (text.strip(), needs_servers(parse(text))) for text in syncs
    ]
    places: list[str | None] = [text.strip() for text in layouts]
    return [
        Entry(sync, workers, needs, layout)
        for layout in places or [None]
        for sync, needs in strategies or [(None, False)]
    ]


def read_lane(text: str, workers: int) -> Entry:
    """One lane: a strategy, a layout, or both, as in `stages=2 · daso` or `stages=2/daso`."""
    words = text
    for sign in _BETWEEN:
        words = words.replace(sign, _BETWEEN[0])
    parts = [part.strip() for part in words.split(_BETWEEN[0])]
    if len(parts) > 2 or not all(parts):
        raise UserError(
            f"--lane {text!r}: give a strategy, a layout, or both, such as stages=2/daso."
        )
    layout: str | None
    sync: str | None
    if len(parts) == 2:
        layout, sync = parts
    elif parts[0].partition(":")[0] in STRATEGIES:
        layout, sync = None, parts[0]
    else:
        layout, sync = parts[0], None
    if layout is not None:
        try:
            read_layout(layout)
        except UserError as error:
            raise UserError(f"--lane {text!r}: {error}") from None
    return Entry(sync, workers, sync is not None and needs_servers(parse(sync)), layout)

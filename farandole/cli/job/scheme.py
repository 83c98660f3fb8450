"""From the texts of --sync, --layout and --transport to what they mean. Imports torch only then."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farandole.layout import Layout
    from farandole.sync import Strategy


def read_scheme(
    sync: str | None, layout: str | None, workers: int
) -> tuple[Strategy | None, Layout | None]:
    """The strategy and the layout that were asked for; None where nothing was.

    Raises `UserError` where they cannot be, or do not go with each other or with so many workers.
    """
    if sync is None and layout is None:
        return None, None
    from farandole.sync import parse
    from farandole.train import settings

    strategy = parse(sync) if sync is not None else None
    found = settings.read_layout(layout) if layout is not None else None
    if found is not None:
        settings.check_workers(found, workers)
        if strategy is not None:
            settings.check_goes_with(found, strategy)
    return strategy, found


def layout_text(layout: Layout) -> str:
    from farandole.train.settings import write_layout

    return write_layout(layout)


def checked_transport(transport: str) -> str:
    from farandole.comm import check_transport

    return check_transport(transport)

"""The sections of the page that its own script draws, and that script.

The script stands in the page. It needs no library and no network, and the page tells the browser to
run nothing else: its policy has the script's hash.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources

from markupsafe import Markup

from farandole.report import units
from farandole.report.interactive.data import embedded, page_data
from farandole.report.lane import labels
from farandole.report.memory import read_peaks
from farandole.report.standing import Results
from farandole.report.templating import fill

_FILES = ("format.js", "plot.js", "chart.js", "timeline.js", "page.js", "live.js")


@cache
def script() -> Markup:
    """All of it. It holds nothing that could end its element."""
    folder = resources.files("farandole.report.interactive") / "scripts"
    text = "\n".join((folder / name).read_text("utf-8") for name in _FILES)
    assert "</" not in text, "it would end the element"
    return Markup(text)


def policy(*, live: bool = False) -> str:
    """What the browser may do with the page: run this script, and fetch nothing.

    A live page may listen to the server that it came from.
    """
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    parts = [
        "default-src 'none'",
        "style-src 'unsafe-inline'",
        "img-src data:",
        f"script-src 'sha256-{digest}'",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    return "; ".join([*parts, "connect-src 'self'"] if live else parts)


def charts(results: Results, *, live: bool = False) -> str:
    """Curves, periods and timelines, with their controls. A live page gets more than it has now."""
    if not results.lanes and not live:
        return ""
    unreached = None
    if (
        results.target is not None
        and not live
        and not any(row.seconds_to_target is not None for row in results.standings)
    ):
        unreached = str(results.target)
    return fill(
        "charts.html", data=embedded(page_data(results)), script=script(), unreached=unreached
    )


def memory(results: Results) -> str:
    """The most that each rank has used."""
    lanes = []
    for index, (name, lane) in enumerate(zip(labels(results.lanes), results.lanes, strict=True)):
        if peaks := read_peaks(lane.folder):
            lanes.append((index, name, peaks))
    if not lanes:
        return ""
    largest = max(peak.process_bytes for _, _, peaks in lanes for peak in peaks)
    return fill("memory.html", lanes=lanes, largest=largest, bytes_count=units.bytes_count)

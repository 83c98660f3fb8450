"""The report: one HTML file that needs nothing else, a PNG of its curves and a JSON summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from farandole.errors import FarandoleError
from farandole.files import write_whole
from farandole.report.interactive.charts import policy
from farandole.report.lane import Lane
from farandole.report.plots import curves as plots
from farandole.report.plots import render
from farandole.report.plots.palette import SHADES
from farandole.report.repeats import are_repeated, group, placed
from farandole.report.repeats_text import repeats_headline, repeats_json
from farandole.report.sections import SECTIONS, Section, sentence
from farandole.report.standing import Results
from farandole.report.summary import plain, summary_json
from farandole.report.target import Target
from farandole.report.templating import fill


def write_report(
    folder: Path, lanes: Sequence[Lane], target: Target | None, facts: Mapping[str, str]
) -> Path:
    """Write `report.html`, `report.png` and `summary.json` into `folder`; return the first.

    `lanes` come in the order in which they were asked for: speed-ups are over the first of them.
    `facts` describe the race as a whole, such as its command line and the machine. Everything is
    drawn before anything is written, and each file is replaced whole or not at all.
    Raises `FarandoleError` when the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FarandoleError(
            f"could not make {folder}: {error.strerror or error}. Choose another folder."
        ) from error
    results = results_of(lanes, target, facts)
    png = render.png(lambda: plots.overview(results))
    # A file name or an argument may hold bytes that are no text; they must not cost the report.
    html = page(results).encode("utf-8", "replace")
    more: dict[str, Any] = {}
    if results.runs:
        ranked = placed(results.runs, target)
        more = {"repeats": repeats_json(ranked)}
        if said := repeats_headline(ranked, target):
            more["headline"] = plain(said)
    summary = summary_json(results, more).encode("utf-8", "replace")
    write_whole(folder / "summary.json", summary)
    write_whole(folder / "report.png", png)
    write_whole(folder / "report.html", html)
    return folder / "report.html"


def results_of(lanes: Sequence[Lane], target: Target | None, facts: Mapping[str, str]) -> Results:
    """With the typical run of each lane in the plots, where there are several."""
    if not are_repeated(lanes):
        return Results(tuple(lanes), target, dict(facts))
    typical = tuple(replace(repeats.typical, seed=None) for repeats in group(lanes, target))
    return Results(typical, target, dict(facts), tuple(lanes))


def page(results: Results, sections: Sequence[Section] = SECTIONS) -> str:
    """The whole page; a section that returns nothing is left out."""
    parts = [Markup(part) for section in sections if (part := section(results))]
    title = plain(sentence(results))
    return str(fill("page.html", title=title, policy=policy(), style=style_sheet(), sections=parts))


def style_sheet() -> Markup:
    return fill("style.css", shades=SHADES)

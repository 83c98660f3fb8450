"""The pages about layouts: every option with its true default, and every layout can be built."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

import farandole
from farandole.layout import Layout, parse_layout
from farandole.schedule.pipelines import STREAMS, schedule_names

ROOT = Path(__file__).parents[2]
PAGES = {
    page.name: page.read_text()
    for page in (*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md")
}
PAGE = PAGES["pipelines.md"]
EVERYTHING = "\n".join([*PAGES.values(), (ROOT / "examples/pipeline.py").read_text()])
TEXTS = {
    text.rstrip(".,") for text in re.findall(r"(?<![\w,])stages=(?:\d|auto)[\w.,=+-]*", EVERYTHING)
}
OBJECTS = set(re.findall(r"fd\.Layout\([^()]*(?:\([^()]*\)[^()]*)*\)", "\n".join(PAGES.values())))


def table(first_column: str, page: str = PAGE) -> list[list[str]]:
    """The cells of a table of a page, row by row."""
    (rows,) = re.findall(
        rf"^\| {re.escape(first_column)} \| .*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE
    )
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows.splitlines()]


def test_every_option_is_there_with_its_default() -> None:
    def as_written(default: object) -> str:
        if default in ((), "", None):
            return "none"
        return str(default).lower() if isinstance(default, bool) else str(default)

    rows = table("option | default") + table("option | default", PAGES["tiles.md"])
    told = [(option.strip("`"), default.strip("`")) for option, default, _ in rows]
    assert told == [(each.name, as_written(each.default)) for each in dataclasses.fields(Layout)]


def test_every_schedule_is_there_and_says_if_it_is_exact() -> None:
    rows = table("`schedule=`")
    assert [row[0].strip("`") for row in rows] == list(schedule_names())
    stale = [row[0].strip("`") for row in rows if row[-1] != "exact"]
    assert stale == list(STREAMS)
    assert ", ".join(f"`{name}`" for name in schedule_names()) in PAGES["README.md"]


@pytest.mark.parametrize("text", sorted(TEXTS))
def test_what_a_page_tells_to_type_parses(text: str) -> None:
    parse_layout(text)


@pytest.mark.parametrize("text", sorted(OBJECTS))
def test_what_a_page_tells_to_write_can_be_built(text: str) -> None:
    layout = eval(text, {"fd": farandole})
    assert parse_layout(str(layout)) == layout


def test_there_is_much_to_check() -> None:
    assert {"stages=auto,microbatches=8", "stages=2,schedule=pipedream"} <= TEXTS
    assert "fd.Layout(stages=4, microbatches=8)" in OBJECTS

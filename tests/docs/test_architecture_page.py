"""The page for newcomers names files that are there, and the rooms in the order that is checked.

FARANDOLE_WRITE_DOCS=1 pytest tests/docs/test_architecture_page.py      writes the table anew
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.house import FLOOR, table

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- rooms -->\n", "<!-- /rooms -->"


def test_the_table_of_rooms_is_the_order_that_is_checked() -> None:
    before, rest = PAGE.read_text().split(BEGIN)
    found, after = rest.split(END)
    if os.environ.get("FARANDOLE_WRITE_DOCS"):
        PAGE.write_text(f"{before}{BEGIN}{table()}\n{END}{after}")
        return
    assert found.strip() == table()


def test_every_file_on_the_way_is_there() -> None:
    named = re.findall(r"`((?:farandole|tests)/[\w/.]+)`", PAGE.read_text())
    assert len(named) > 60, "four walks name each file on the way"
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_walks_come_by_the_rooms_that_carry_a_training() -> None:
    walked = set(re.findall(r"`farandole/(\w+)/", PAGE.read_text()))
    assert {"train", "layout", "sync", "comm", "server", "schedule", "launch", "worker"} <= walked
    assert walked <= set(FLOOR)

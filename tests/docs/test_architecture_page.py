"""The pages for newcomers name existing files, and list the rooms in the order that is checked.

FARANDOLE_WRITE_DOCS=1 pytest tests/docs/test_architecture_page.py      writes the table anew
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.house import FLOOR, table

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- rooms -->\n", "<!-- /rooms -->"


def test_the_table_of_rooms_is_the_order_that_is_checked() -> None:
    before, rest = PAGE.read_text().split(BEGIN)
    found, after = rest.split(END)
    if os.environ.get("FARANDOLE_WRITE_DOCS"):
        PAGE.write_text(f"{before}{BEGIN}{table()}\n{END}{after}")
        return
    assert found.strip() == table()


def named_in(text: str) -> list[str]:
    return re.findall(r"`((?:farandole|tests|docs|benchmarks)/[\w/.-]+)`", text)


@pytest.mark.parametrize("page", [PAGE, CONTRIBUTING], ids=["architecture", "contributing"])
def test_every_path_on_the_page_exists(page: Path) -> None:
    named = named_in(page.read_text())
    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_five_walks_name_the_files_on_the_way() -> None:
    walks = re.findall(r"^## Walk \d: .*?(?=^## )", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(walks) == 5
    for walk in walks:
        steps = re.findall(r"^\d\. .*?(?=^\d\. |\Z)", walk, re.DOTALL | re.MULTILINE)
        assert len(steps) > 5
        without_a_file = [
            step for step in steps if not any((ROOT / path).is_file() for path in named_in(step))
        ]
        assert not without_a_file


def test_there_is_one_picture() -> None:
    assert PAGE.read_text().count("\n```") == 2, "where it begins, and where it ends"


def test_the_walks_come_by_the_rooms_that_carry_a_training() -> None:
    walked = set(re.findall(r"`farandole/(\w+)/", PAGE.read_text()))
    assert {"train", "layout", "sync", "comm", "server", "schedule", "launch", "worker"} <= walked
    assert walked <= set(FLOOR)

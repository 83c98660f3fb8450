"""The page about schedules: its code runs and prints what it says, its drawings are real."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from farandole.schedule import ALGORITHMS, halving_doubling, ring

PAGE = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text()


def test_the_code_runs_and_prints_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "docs/schedules.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "[4000 4000 4000]" in printed
    assert "two_level: 544 ms" in printed
    assert "ring: 806 ms" in printed
    assert names["chain"](3).draw().splitlines()[1:] == [
        "  0: 0→1 +0",
        "  1: 1→2 +0",
        "  2: 2→1 =0",
        "  3: 1→0 =0",
    ]


def test_the_drawings_are_those_of_the_schedules() -> None:
    for schedule in (ring(3), halving_doubling(4)):
        assert f"```text\n{schedule.draw()}\n```" in PAGE


def test_every_algorithm_is_described() -> None:
    for name in ALGORITHMS:
        assert f"| `{name}`" in PAGE
        assert f"**`{name}`**" in PAGE

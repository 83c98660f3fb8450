"""A few drills of `benchmarks/drills.py`; that its page shows its result; that a drill can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _benchmarks_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    # The tests' own variable: drills start their jobs as a user's shell does, forked by Farandole.
    monkeypatch.delenv("FARANDOLE_FORK", raising=False)


def test_a_selection_ends_as_promised(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "benchmarks/drills.py", "--selection", "--folder", tmp_path]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 of 8 ended as promised" in done.stdout


def test_a_broken_promise_is_found(tmp_path: Path) -> None:
    from faults.book import Book
    from faults.table import drills

    (drill,) = (row for row in drills() if row.name == "allreduce/first_step/rank_1/SIGKILL")
    wrong = replace(drill.promise, codes=(3,), names=("rank 7",), right=True)
    ((_, record),) = Book(tmp_path).run([replace(drill, promise=wrong)], jobs=1)
    assert record["code"] == 137
    assert record["broken"] == [
        "exit code 137, not 3",
        "nothing in the output matches 'rank 7'",
        "no weights were saved",
    ]


def test_the_page_shows_the_kept_result() -> None:
    from faults.page import BEGIN, END, PAGE, RESULT, table

    result = json.loads(RESULT.read_text())
    assert table(result) == PAGE.read_text().split(BEGIN + "\n")[1].split(END)[0]


def test_the_result_is_of_this_table() -> None:
    from faults.page import RESULT
    from faults.table import drills

    kept = [record["drill"] for record in json.loads(RESULT.read_text())["drills"]]
    assert kept == [drill.name for drill in drills() if drill.name in kept]

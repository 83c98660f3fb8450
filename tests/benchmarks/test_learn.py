"""`benchmarks/learn.py` runs to its end on small tables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.needs("sklearn")


def measured(tmp_path: Path, what: str, *options: str) -> Any:
    command = [sys.executable, ROOT / "benchmarks/learn.py", what, *options]
    done = subprocess.run(
        [*command, "--results", tmp_path, "--folder", tmp_path / "data"],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((tmp_path / f"learn_{what}.json").read_text())


def test_compare(tmp_path: Path) -> None:
    options = ["--rows", "3000", "--columns", "6", "--rounds", "1", "--only", "lasso"]
    found = measured(tmp_path, "compare", *options)["algorithms"]["lasso"]
    objectives = [side["objective"] for side in found["sides"].values()]
    assert len(objectives) >= 4
    assert max(objectives) < 1.0001 * min(objectives)
    assert found["ratio_to_the_fastest"] > 0


def test_growth(tmp_path: Path) -> None:
    options = ["--rows", "2000", "4000", "--columns", "4", "--workers", "1", "--rounds", "1"]
    found = measured(tmp_path, "growth", *options)
    assert [one["rows"] for one in found["passes"]] == [2000, 4000]
    assert all(one["predicted"] > 0 for one in found["passes"])


def test_memory(tmp_path: Path) -> None:
    found = measured(tmp_path, "memory", "--times", "0.004", "--columns", "12")
    for library in ("farandole", "sklearn"):
        assert found[library]["pca"]["seconds"] > 0
        assert found[library]["kmeans"]["seconds"] > 0

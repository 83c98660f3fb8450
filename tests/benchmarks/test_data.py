"""The sides of `benchmarks/data.py` that need no other package read every sample, on very few."""

from __future__ import annotations

import json
from importlib import util
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "data.py"


def test_both_sides_read_every_sample(
    sandbox: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    found = util.spec_from_file_location("benchmark_of_data", SCRIPT)
    assert found is not None
    assert found.loader is not None
    benchmark = util.module_from_spec(found)
    found.loader.exec_module(benchmark)
    for side, write in (("files", benchmark.write_files), ("farandole", benchmark.write_tars)):
        folder = tmp_path / side
        folder.mkdir()
        write(((number, benchmark.encoded("array", number)) for number in range(100)), folder)
        words = ["--here", side, "--folder", str(folder), "--kind", "array"]
        done = sandbox.fork(SCRIPT, *words)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["samples"] == 100

"""The side of `benchmarks/link_in_software.py` that needs no root runs, on very few messages."""

from __future__ import annotations

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_simulated_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from link_in_software import simulated

    words = ["--repeats", "1", "--kibibytes", "4"]
    found = simulated("1gbit,1ms", "c10d", words, tmp_path / "result.json")
    assert set(found) == {"ping_pong 4 KiB", "all_reduce 4 KiB"}
    assert all(min(times) >= 0.001 for times in found.values()), found

"""`benchmarks/link_in_software.py` runs to its end, on as few messages as it can."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "link_in_software.py"


@pytest.mark.timeout(400)
def test_it_compares_both_links(root: None, tmp_path: Path) -> None:
    arguments = ["--repeats", "1", "--kibibytes", "4", "--rate", "1gbit", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=390,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "link_in_software.json").read_text())
    assert set(found["seconds"]) == {"emulated", "simulated_c10d", "simulated_shm"}
    assert set(found["ratio_to_emulated"]["simulated_shm"]) == {
        "ping_pong 4 KiB",
        "all_reduce 4 KiB",
    }

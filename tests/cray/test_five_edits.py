"""The plugin's functions between processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parent / "scripts/five_edits.py"


def test_the_five_edits_train_as_one_worker_does(sandbox: Any) -> None:
    job = sandbox.farandole("run", "-n", "2", SCRIPT)
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("done") == 2
    assert "team 0: 5 steps in" in job.stdout
    assert "team 1: 10 steps in" in job.stdout
    assert "check_buffers_match: differs from rank 0: weight (ranks [1])" in job.stdout


def test_other_strategies_are_refused(sandbox: Any) -> None:
    job = sandbox.farandole("run", "-n", "1", "--sync", "local:every=8", SCRIPT)
    assert job.returncode != 0
    assert "--sync local: fd.cray averages gradients" in job.stderr

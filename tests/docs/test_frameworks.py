"""Libraries that own the loop train a model that Farandole keeps in step. Skipped without them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "frameworks"
NEEDS = {
    "with_accelerate.py": ["accelerate"],
    "with_lightning.py": ["lightning"],
    "with_transformers.py": ["transformers", "accelerate"],
}


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(NEEDS)


@pytest.mark.parametrize("sync", ["allreduce", "local:every=4"])
@pytest.mark.parametrize("example", NEEDS)
def test_it_learns_and_stays_in_step(sandbox: Any, example: str, sync: str) -> None:
    for package in NEEDS[example]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    script = str(EXAMPLES / example)
    done = sandbox.farandole("run", "-n", "2", "--name", "r", "--sync", sync, script)
    assert done.returncode == 0, done.stderr  # ranks that are apart would have been stopped
    lines = (sandbox.folder / "runs/r/metrics.jsonl").read_text().splitlines()
    logs = [record for line in lines if (record := json.loads(line))["event"] == "log"]
    assert logs[-1]["metrics"]["accuracy"] > 0.7

"""fd.keras between processes, each backend in a job of its own: importing one takes seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
EXAMPLES = Path(__file__).parents[2] / "examples/frontends"


@pytest.mark.parametrize("backend", ["torch", "tensorflow", "jax"])
def test_what_fd_keras_does(sandbox: Any, backend: str) -> None:
    job = sandbox.farandole(
        *("run", "-n", "2", "--pretend-hosts", "2", SCRIPTS / "keras_checks.py"),
        KERAS_BACKEND=backend,
        TF_CPP_MIN_LOG_LEVEL="3",
    )
    assert job.returncode == 0, job.stdout + job.stderr
    assert f"checks passed on 2 with {backend}" in job.stdout


def test_the_keras_example_is_raced(sandbox: Any) -> None:
    lanes = ["--sync", "allreduce", "--sync", "local:every=8", "--sync", "daso"]
    options = ["-n", "2", "--pretend-hosts", "2", *lanes, "--target", "val_accuracy=0.9"]
    script = EXAMPLES / "keras_rings.py"
    race = sandbox.farandole(
        *("race", *options, script, "--epochs", "6"),
        KERAS_BACKEND="torch",
        TF_CPP_MIN_LOG_LEVEL="3",
    )
    assert race.returncode == 0, race.stdout + race.stderr
    for number, lane in enumerate(("allreduce", "local", "daso"), 1):
        (folder,) = (sandbox.folder / "runs").glob(f"race-*/{number}-*")
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert lines[0]["sync"].split(":")[0] == lane
        logged = [line for line in lines if line["event"] == "log"]
        assert max(line["metrics"]["val_accuracy"] for line in logged) > 0.9, lane
        assert logged[-1]["samples"] >= 6 * 2304  # rows that whole batches of both ranks have

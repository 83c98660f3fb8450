"""Jobs under parameter servers as real processes, some of which are killed on the way."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Sandbox

SCRIPT = Path(__file__).parent / "scripts" / "served.py"


def epochs(folder: Path) -> list[dict[str, Any]]:
    """What was logged."""
    (file,) = folder.rglob("metrics.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [line["metrics"] for line in lines if line["event"] == "log"]


def test_a_worker_and_a_server_die_and_the_job_goes_on(sandbox: Sandbox) -> None:
    job = ("-n", "3", "--servers", "2", "--sync", "server:staleness=2")
    done = sandbox.farandole("run", *job, SCRIPT, "worker", "server")
    assert done.returncode == 0, done.stderr
    assert sandbox.processes() == []
    assert "farandole: rank 2 was killed by SIGKILL; the others go on\n" in done.stderr
    assert "farandole: a parameter server was killed by SIGKILL; its successor" in done.stderr
    *_, last = done.stderr.splitlines()
    assert last.startswith("farandole: done, but without rank 2; every rank's output is in ")
    logged = epochs(sandbox.folder)
    assert [line["present"] for line in logged] == [3, 2, 2, 2]
    assert logged[-1]["accuracy"] > 0.9


@pytest.mark.mpi
def test_under_mpirun_rank_0_keeps_the_server(sandbox: Sandbox, mpirun: list[str]) -> None:
    done = sandbox.run([*mpirun, "-n", "2", sys.executable, SCRIPT])
    assert done.returncode == 0, done.stderr
    assert [line["present"] for line in epochs(sandbox.folder)] == [2] * 4
    assert float(re.findall(r"end ([\d.]+)", done.stdout)[0]) > 0.9

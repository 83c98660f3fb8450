"""fd.jax between processes. Importing JAX takes seconds: one job has many checks."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from farandole.jax.collectives import buckets

SCRIPTS = Path(__file__).parent / "scripts"
EXAMPLES = Path(__file__).parents[2] / "examples/frontends"


@pytest.mark.parametrize("size", [1, 2])
def test_what_fd_jax_does(sandbox: Any, size: int) -> None:
    job = sandbox.farandole("run", "-n", str(size), SCRIPTS / "jax_checks.py")
    assert job.returncode == 0, job.stdout + job.stderr
    assert f"13 checks passed on {size}" in job.stdout


def test_the_flax_example_is_raced(sandbox: Any) -> None:
    lanes = ["--sync", "allreduce", "--sync", "local:every=8", "--sync", "daso"]
    options = ["-n", "2", "--pretend-hosts", "2", *lanes, "--target", "accuracy=0.9"]
    script = EXAMPLES / "flax_rings.py"
    race = sandbox.farandole("race", *options, script, "--epochs", "4", "--batch", "128")
    assert race.returncode == 0, race.stdout + race.stderr
    for number, lane in enumerate(("allreduce", "local-every-8", "daso"), 1):
        (folder,) = (sandbox.folder / "runs").glob(f"race-*/{number}-*")
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert lines[0]["sync"].split(":")[0] == lane.split("-")[0]
        best = max(line["metrics"]["accuracy"] for line in lines if line["event"] == "log")
        assert best > 0.9, lane


def test_plain_gradient_averages_refuse_other_strategies(sandbox: Any) -> None:
    script = sandbox.script(
        "script.py",
        "import farandole as fd\nfd.jax.init()\nfd.jax.average_gradients()\n",
    )
    job = sandbox.farandole("run", "-n", "1", "--sync", "local:every=8", script)
    assert job.returncode != 0
    assert "--sync local: average_gradients() is a plain all-reduce" in job.stderr


def test_large_arrays_travel_in_few_buckets_from_the_last_on() -> None:
    megabyte = 2**20
    assert buckets([100]) == [[]]
    assert buckets([100, megabyte, 200]) == [[1]]
    assert buckets([5 * megabyte, 100, 3 * megabyte, 2 * megabyte]) == [[3, 2], [0]]
    many = buckets([megabyte] * 1000)
    assert len(many) <= 9
    assert sorted(itertools.chain(*many)) == list(range(1000))

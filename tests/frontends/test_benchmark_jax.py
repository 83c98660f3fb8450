"""The benchmark of JAX runs, and both of its sides train the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_both_sides_train_alike(sandbox: Any) -> None:
    copy = sandbox.folder / "benchmarks"
    copy.mkdir()
    for name in ("common.py", "frontends_jax.py"):
        (copy / name).write_text((BENCHMARKS / name).read_text())
    cases = ["--cases", "0.1 M parameters, batch 32"]
    job = sandbox.fork(copy / "frontends_jax.py", "--blocks", "1", *cases, "--name", "small")
    assert job.returncode == 0, job.stdout + job.stderr
    result = json.loads((copy / "results/small.json").read_text())
    (case,) = result["cases"].values()
    assert case["largest_difference_of_weights"] < 1e-5
    assert case["step_ms"].keys() == {"fd.jax", "jax.distributed"}
    assert "largest ratio" in job.stdout

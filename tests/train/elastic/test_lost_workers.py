"""Workers that are killed for good in the middle of a step: the weights are those of one process
that takes the same steps, with exactly the samples that the survivors and newcomers read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.elastic_replay import SCRIPT as KILLED
from tests.support.elastic_replay import require_exact


@pytest.mark.parametrize(
    ("doomed", "survivors"),
    [
        # Rank 0, before it has begun to average; then in the next generation the last rank, in the
        # middle of its buckets.
        (["0:2:forward", "3:9:backward"], {"1", "2"}),
        # Its gradients are in the average, and it does not apply it; two at once.
        (["2:4:step", "1:4:forward"], {"0", "3"}),
    ],
)
def test_survivors_finish_the_step(
    farandole_cli: Any, tmp_path: Path, doomed: list[str], survivors: set[str]
) -> None:
    few = "allreduce:bucket_mib=0.0001"  # per bucket: each tensor has its own
    done = farandole_cli("run", "-n", "4", "--min", "2", "--sync", few, KILLED, *doomed)
    assert done.returncode == 0, done.stderr
    require_exact(tmp_path, survivors)
    assert "was killed by SIGKILL" in done.stderr


def test_replacements_join_in_the_middle_of_an_epoch(sandbox: Any, tmp_path: Path) -> None:
    """Rank 0 is killed, and then its successor. The log goes on in one file."""
    words = ["-n", "4", "--min", "2", "--restarts", "2", "--name", "one", KILLED]
    done = sandbox.farandole("run", *words, "0:3:backward", "1:12:forward", REPLACES="1")
    assert done.returncode == 0, done.stderr
    require_exact(tmp_path, {"2", "3", "4", "5"})
    log = tmp_path / "runs" / "one" / "metrics.jsonl"
    records = [json.loads(line) for line in log.read_text().splitlines()]
    logged = [record["metrics"] for record in records if record["event"] == "log"]
    assert [metrics["epoch"] for metrics in logged] == list(range(len(logged)))
    assert logged[-1]["size"] == 4

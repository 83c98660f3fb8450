"""Automatic checkpoints of jobs whose workers come and go, and what is left when all are gone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.elastic_replay import require_exact

SCRIPT = Path(__file__).parent / "scripts" / "checkpoints.py"


def test_all_workers_are_killed(sandbox: Any) -> None:
    """First rank 0, whose successor goes on saving; then all that are there. Nobody has named the
    run: those that begin anew find its folder all the same."""
    words = ["-n", "2", "--restarts", "6", "--checkpoint", "every=5steps,keep=2", SCRIPT, "40"]
    # Worker 2 takes the place of worker 0. It may have joined by then, or not.
    done = sandbox.farandole("run", *words, "0:8", "1:24", "2:24")
    assert done.returncode == 0, done.stderr
    assert "no worker is left that has the state: all are started again" in done.stderr
    (run,) = (sandbox.folder / "runs").iterdir()
    assert f"going on from runs/{run.name}/checkpoints/" in done.stdout
    assert len(list((run / "checkpoints").glob("[0-9]*"))) == 2
    went_on_at = 21  # after the save that followed step 20
    for path in sandbox.folder.glob("used-*"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        if path.name in ("used-0", "used-1", "used-2"):
            assert all(step < 24 for step, *_ in lines)
            kept = [line for line in lines if line[0] < went_on_at]
            path.write_text("".join(json.dumps(line) + "\n" for line in kept))
        else:
            assert lines[0][0] == went_on_at
    survivors = {path.name.removeprefix("weights-") for path in sandbox.folder.glob("weights-*")}
    assert len(survivors) == 2
    require_exact(sandbox.folder, survivors, rate=0.02)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    logged = [each["metrics"]["epoch"] for each in records if each["event"] == "log"]
    assert sorted(set(logged)) == list(range(max(logged) + 1))


def test_newcomers_take_part_in_saves_by_time(sandbox: Any) -> None:
    """Rank 0 is killed twice. Newcomers join in the middle of epochs, and all save together."""
    words = ["-n", "3", "--restarts", "6", "--checkpoint", "every=0.05s,keep=3,best=loss"]
    words += ["--name", "one", SCRIPT, "40", "0:5", "1:40"]
    done = sandbox.farandole("run", *words, WHOLE="3")
    assert done.returncode == 0, done.stderr
    require_exact(sandbox.folder, {"2", "3", "4"}, rate=0.02)
    assert "warning" not in done.stdout
    kept = list((sandbox.folder / "runs" / "one" / "checkpoints").glob("[0-9]*"))
    assert 3 <= len(kept) <= 4  # the best one may be older

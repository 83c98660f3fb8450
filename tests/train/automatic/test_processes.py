"""Real jobs that are killed: the same command again goes on, in the middle of the epoch."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Sandbox

SCRIPT = Path(__file__).parents[1] / "scripts" / "saves_on_the_way.py"
LATE = SCRIPT.with_name("late_worker.py")
EPOCHS, SAMPLES = 3, 96


def lines(folder: Path) -> list[dict[str, Any]]:
    found = []
    for path in folder.glob("seen-*"):
        whole = path.read_text().rpartition("\n")[0]  # the last may be torn
        found += [json.loads(line) for line in whole.splitlines()]
    return found


def saved(folder: Path) -> list[Path]:
    """The manifests, in the run's own folder or in the store."""
    return [
        *folder.glob("runs/killed/checkpoints/[0-9]*/manifest.json"),
        *folder.glob("store/*/manifest.json"),
    ]


def kill_job(sandbox: Sandbox, job: Any, *, by_user: bool) -> None:
    """When two checkpoints are there: all at once, as when a host is gone, or by Ctrl-C."""
    sandbox.wait_until(
        lambda: job.poll() is not None or len(saved(sandbox.folder)) >= 2, "two are saved"
    )
    assert job.poll() is None, job.communicate()
    if by_user:
        os.kill(job.pid, signal.SIGINT)
    else:
        for process in sandbox.processes():
            os.kill(process.pid, signal.SIGKILL)
    job.communicate()


@pytest.mark.parametrize(
    ("policy", "first", "then"),
    [
        ("every=5steps,keep=2", ["-n", "2"], ["-n", "1"]),
        ("every=0.05s,keep=2", ["-n", "2"], ["-n", "2"]),
        ("every=5steps,keep=2,to=file://{folder}/store", ["-n", "2"], ["-n", "2"]),
        ("every=5steps,keep=2", ["-n", "2", "--layout", "stages=2,microbatches=2"], ["-n", "2"]),
    ],
    ids=["steps", "time", "store", "stages"],
)
def test_killed_and_started_again(
    sandbox: Sandbox, policy: str, first: list[str], then: list[str]
) -> None:
    folder = sandbox.folder
    words = ["--name", "killed", "--checkpoint", policy.format(folder=folder)]
    before, after = folder / "before", folder / "after"
    before.mkdir()
    after.mkdir()
    job = sandbox.start_farandole("run", *first, *words, SCRIPT, before, "0.05")
    by_user = "store" in policy
    kill_job(sandbox, job, by_user=by_user)
    done = sandbox.farandole("run", *then, *words, SCRIPT, after, "0")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "going on from" in done.stdout

    replicas = 1 if "--layout" in first else 2
    early, late = lines(before), lines(after)
    went_on_at = min(line["steps"] for line in late) - 1
    assert went_on_at > 0
    used = Counter(
        (line["epoch"], sample)
        for line in early
        if line["steps"] <= went_on_at and line["rank"] < replicas
        for sample in line["samples"]
    )
    used.update((line["epoch"], sample) for line in late for sample in line["samples"])
    assert used == Counter((epoch, each) for epoch in range(EPOCHS) for each in range(SAMPLES))

    checkpoints = {path.parent for path in saved(folder)}
    assert len(checkpoints) == 2
    (place,) = {path.parent for path in checkpoints}
    assert {path for path in place.iterdir() if path.is_dir()} == checkpoints  # none half-written
    attempts = json.loads((folder / "runs/killed/attempts.json").read_text())["attempts"]
    assert [attempt["failed"] for attempt in attempts] == [not by_user, False]


def test_a_policy_that_cannot_be_is_refused_before_anything_starts(sandbox: Sandbox) -> None:
    done = sandbox.farandole("run", "--checkpoint", "every=10", SCRIPT, sandbox.folder, "0")
    assert done.returncode != 0
    assert "write a number with its unit" in done.stderr
    done = sandbox.farandole(
        "run", "--horovod", "--checkpoint", "every=10s", SCRIPT, sandbox.folder, "0"
    )
    assert done.returncode != 0
    assert "Leave out --checkpoint or --horovod" in done.stderr


def test_a_worker_that_comes_back_late_saves_with_the_others(sandbox: Sandbox) -> None:
    """Under parameter servers, where one may die and be started again."""
    words = ["--sync", "server", "--restarts", "1", "--name", "killed"]
    policy = ["--checkpoint", "every=20steps,keep=2"]
    done = sandbox.farandole("run", "-n", "2", *words, *policy, LATE)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "saved between two epochs only" in done.stdout
    assert (sandbox.folder / "came-back").exists()
    assert "rank 1 has come to the end" in done.stdout
    assert len(saved(sandbox.folder)) == 2

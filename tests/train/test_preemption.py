"""SIGTERM and SIGUSR1 save once more: all ranks at one step, within the grace or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from farandole.train.checkpoint import checkpoint

if TYPE_CHECKING:
    from conftest import Sandbox

SCRIPT = Path(__file__).parent / "scripts" / "preempted.py"


def start(
    sandbox: Sandbox, mode: str, *options: str, workers: int = 2
) -> tuple[subprocess.Popen[str], list[int]]:
    """A job that is in the middle of its training, and its ranks' process ids."""
    job = sandbox.start_farandole("run", "-n", str(workers), *options, SCRIPT, mode)
    ready = [sandbox.folder / f"ready-{rank}" for rank in range(workers)]
    sandbox.wait_until(
        lambda: job.poll() is not None or all(path.exists() for path in ready), "all ranks train"
    )
    assert job.poll() is None, job.communicate()
    sandbox.wait_until(lambda: all(path.read_text() for path in ready), "all ids are written")
    return job, [int(path.read_text()) for path in ready]


def saved(sandbox: Sandbox) -> dict[str, Any]:
    folder = sandbox.folder / "runs" / "preempted" / "checkpoints"
    newest = checkpoint.newest(folder)
    assert newest is not None
    return checkpoint.read(newest)


def check_saved(parts: dict[str, Any]) -> None:
    """One step of one run: what was counted, what was trained, what was read."""
    steps = int(parts["state"]["steps"])
    assert steps >= 4
    assert parts["model-0"]["bias"].item() == steps  # each adds 1, if both ranks took part
    assert {"rank-0", "rank-1"} <= parts.keys()
    assert parts["run"]["loaders"][0]["done_samples"] == parts["run"]["samples"]


def test_the_launcher_is_told_to_stop(sandbox: Sandbox) -> None:
    # A signal to the group of processes, as a scheduler sends it: the ranks get it from the
    # launcher, and loading processes, which are in the ranks' groups, must not die of it.
    job, _ = start(sandbox, "dataloader", "--grace", "120")
    os.killpg(job.pid, signal.SIGTERM)
    done = sandbox.finish(job)
    assert done.returncode == 143, done.stderr
    assert "SIGTERM: the workers have 120 s to save and leave (--grace)" in done.stderr
    assert done.stderr.endswith("farandole: stopped by SIGTERM; no worker is left\n")
    assert "Traceback" not in done.stderr
    parts = saved(sandbox)
    check_saved(parts)
    again = sandbox.farandole("run", "-n", "2", SCRIPT)
    steps = int(parts["state"]["steps"])
    assert again.stdout.count(f"went on after {steps} steps, run.steps {steps}") == 2
    assert again.stdout.count(f"bias {steps}") == 2


@pytest.mark.parametrize("mode", ["accumulate", "own-data"])
def test_one_process_is_told_and_all_ranks_save(sandbox: Sandbox, mode: str) -> None:
    # Three are forked from one process that has imported torch; two start afresh.
    job, pids = start(sandbox, mode, "--grace", "120", workers=2 if mode == "accumulate" else 3)
    if mode == "accumulate":
        number, code = signal.SIGTERM, 143
        os.kill(pids[1], number)
    else:  # Slurm's warning, which the launcher passes on
        number, code = signal.SIGUSR1, 138
        os.kill(job.pid, number)
    done = sandbox.finish(job)
    assert done.returncode == code, done.stderr
    assert f"farandole: stopped by {number.name}; no worker is left" in done.stderr
    assert f"leaving with {code}" in done.stdout
    parts = saved(sandbox)
    steps = int(parts["state"]["steps"])
    assert parts["model-0"]["bias"].item() == steps  # no gradient was left half-way
    if mode == "accumulate":
        assert parts["run"]["steps"] == 4 * steps


@pytest.mark.parametrize("mode", ["slow-save", "stuck"])
def test_what_takes_longer_than_the_grace(sandbox: Sandbox, mode: str) -> None:
    job, _ = start(sandbox, mode, "--grace", "6")
    began = time.monotonic()
    os.kill(job.pid, signal.SIGTERM)
    done = sandbox.finish(job)
    assert time.monotonic() - began < 60
    assert done.returncode == 143
    what = {"slow-save": "has not ended its save", "stuck": "has not come to the end of its step"}
    assert what[mode] in done.stderr
    assert "the newest checkpoint is runs/preempted/checkpoints/000000" in done.stderr
    assert int(saved(sandbox)["state"]["steps"]) == 0  # the one from the beginning


def test_a_second_signal_ends_at_once(sandbox: Sandbox) -> None:
    job, _ = start(sandbox, "slow-save", "--grace", "600")
    os.kill(job.pid, signal.SIGTERM)
    sandbox.wait_until((sandbox.folder / "saving-0").exists, "the save is under way")
    time.sleep(3)  # a second one that comes sooner is the same request
    os.kill(job.pid, signal.SIGTERM)
    done = sandbox.finish(job)
    assert done.returncode == 143
    assert int(saved(sandbox)["state"]["steps"]) == 0


def test_alone_and_without_a_launcher(sandbox: Sandbox) -> None:
    job = sandbox.start([sys.executable, SCRIPT, "plain"])
    sandbox.wait_until((sandbox.folder / "ready-0").exists, "it trains")
    job.send_signal(signal.SIGTERM)
    done = sandbox.finish(job)
    assert done.returncode == 143, done.stderr
    parts = saved(sandbox)
    assert parts["model-0"]["bias"].item() == int(parts["state"]["steps"])

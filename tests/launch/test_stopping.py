"""Killed workers, Ctrl-C, a killed launcher: nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Sandbox

STUCK = Path(__file__).parent / "scripts" / "stuck.py"


def start_stuck(sandbox: Sandbox) -> tuple[subprocess.Popen[str], list[list[int]]]:
    """A job of which rank 0 sits in a collective for ever; and the process ids of each rank."""
    job = sandbox.start_farandole("run", "-n", "2", STUCK)
    ready = [sandbox.folder / f"ready-{rank}" for rank in range(2)]
    sandbox.wait_until(
        lambda: job.poll() is not None or all(path.exists() for path in ready), "both workers run"
    )
    assert job.poll() is None, job.communicate()
    pids = [[int(pid) for pid in path.read_text().split()] for path in ready]
    running = {process.pid for process in sandbox.processes()}
    assert {job.pid, *pids[0], *pids[1]} <= running
    assert len(pids[1]) == 3  # the worker, its data loader's process, and `sleep`
    return job, pids


def test_a_worker_killed_outright(sandbox: Sandbox) -> None:
    job, pids = start_stuck(sandbox)
    os.kill(pids[1][0], signal.SIGKILL)
    done = sandbox.finish(job)
    assert sandbox.processes() == []
    assert done.returncode == 137
    last = done.stderr[done.stderr.rindex("\nfarandole: rank ") :].splitlines()
    assert last[1] == "farandole: rank 1 was killed by SIGKILL; the other was stopped"
    assert "memory runs out" in last[-2]
    assert Path(last[-1].split()[-1]).is_dir()


def test_a_worker_interrupted(sandbox: Sandbox) -> None:
    job, pids = start_stuck(sandbox)
    os.kill(pids[1][0], signal.SIGINT)
    done = sandbox.finish(job)
    assert sandbox.processes() == []
    assert done.returncode == 130
    assert "farandole: rank 1 was killed by SIGINT; the other was stopped" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_launcher_told_to_stop(sandbox: Sandbox, number: signal.Signals) -> None:
    job, _ = start_stuck(sandbox)
    os.killpg(job.pid, number)
    done = sandbox.finish(job)
    assert sandbox.processes() == []
    assert done.returncode == 128 + number
    assert done.stderr == f"farandole: stopped by {number.name}; no worker is left\n"
    assert list(sandbox.temporary.glob("farandole-*")) == []


def test_a_second_ctrl_c_leaves_nothing_behind_either(sandbox: Sandbox) -> None:
    # These workers take their time over SIGTERM, as one that saves a checkpoint does.
    script = sandbox.script(
        "slow.py",
        """
import os, signal, time
from pathlib import Path

signal.signal(signal.SIGTERM, lambda *_: Path(f"told-{os.environ['RANK']}").touch())
Path(f"ready-{os.environ['RANK']}").touch()
time.sleep(600)
""",
    )
    job = sandbox.start_farandole("run", "-n", "2", "--grace", "3", script)
    for word in ("ready", "told"):
        sandbox.wait_until(
            lambda word=word: all((sandbox.folder / f"{word}-{rank}").exists() for rank in (0, 1)),
            f"both workers are {word}",
        )
        os.killpg(job.pid, signal.SIGINT)
    done = sandbox.finish(job)
    assert sandbox.processes() == []
    assert done.returncode == 130

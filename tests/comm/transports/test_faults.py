"""A rank that dies or stops during any collective, on any transport between processes."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

if TYPE_CHECKING:
    from conftest import Sandbox

FAULTS = Path(__file__).parents[1] / "scripts" / "faults.py"
VICTIM, SURVIVORS = 1, (0, 2)
CASES = 13
TIMEOUT_SECONDS = 30  # the slowest survivor answers sooner, even on a machine that stands still
SLACK_SECONDS = 20  # to find out who is missing, and for a busy machine


def start(sandbox: Sandbox, command: list[str], transport: str, *worlds: str) -> Any:
    for world in worlds:
        (sandbox.folder / world).mkdir()
    return sandbox.start([*command, sys.executable, FAULTS, transport, *worlds])


def strike(sandbox: Sandbox, job: Any, world: str, how: signal.Signals) -> psutil.Process:
    """Waits until every collective is under way on every rank, then hits one of them."""
    ready = [sandbox.folder / world / f"ready-{rank}.json" for rank in range(3)]
    sandbox.wait_until(
        lambda: all(map(Path.exists, ready)) or job.poll() is not None, "every collective under way"
    )
    if job.poll() is not None:
        pytest.fail(f"it ended before anybody struck: {sandbox.finish(job).stderr}")
    victim = psutil.Process(json.loads(ready[VICTIM].read_text())["pid"])
    victim.send_signal(how)
    (sandbox.folder / world / "struck").touch()
    return victim


def require_named(sandbox: Sandbox, world: str, struck: float) -> None:
    """Every survivor names the collective and the lost rank, and no other, in time."""
    for rank in SURVIVORS:
        told = sandbox.folder / world / f"errors-{rank}.json"
        sandbox.wait_until(told.exists, f"errors on rank {rank}")
        by_case: dict[str, Any] = json.loads(told.read_text())
        assert len(by_case) == CASES
        for case, found in by_case.items():
            reasons = "did not answer within 30 s|hung up|has ended"
            wanted = rf"{case.split()[0]}.* failed on rank {rank} of 3: rank {VICTIM} ({reasons})"
            assert re.match(wanted, found["error"]), f"{world}, {case}: {found}"
            assert found["at"] - struck < TIMEOUT_SECONDS + SLACK_SECONDS, f"{world}, {case}"
            if case != "subgroup":  # the world itself was not used; its subgroups were
                again = "broken by an earlier failure: rank 1 "
                assert again in found["after"], f"{world}, {case}: {found}"


@pytest.mark.parametrize("transport", ["c10d", "shm", "hosts"])
def test_a_lost_rank_is_named(sandbox: Sandbox, transport: str) -> None:
    job = start(sandbox, [], transport, "killed", "stopped")
    try:
        strike(sandbox, job, "killed", signal.SIGKILL)
        victim = strike(sandbox, job, "stopped", signal.SIGSTOP)
        struck = time.monotonic()
        require_named(sandbox, "killed", struck)
        require_named(sandbox, "stopped", struck)
        victim.kill()
    except BaseException:
        for process in sandbox.processes():  # one that is stopped would hold the output open
            process.kill()
        raise
    finally:
        for world in ("killed", "stopped"):
            (sandbox.folder / world / "go").touch()
        sandbox.finish(job)
    sandbox.wait_until_gone()


@pytest.mark.mpi
@pytest.mark.needs("mpi4py")
def test_a_stopped_rank_is_named_over_mpi(sandbox: Sandbox, mpirun: list[str]) -> None:
    """And when the survivors have ended, mpirun ends the stopped one too."""
    job = start(sandbox, [*mpirun, "-n", "3"], "mpi", "stopped")
    try:
        strike(sandbox, job, "stopped", signal.SIGSTOP)
        require_named(sandbox, "stopped", time.monotonic())
    finally:
        (sandbox.folder / "stopped" / "go").touch()
        done = sandbox.finish(job)
    assert done.returncode != 0, done.stderr
    sandbox.wait_until_gone()


@pytest.mark.mpi
@pytest.mark.needs("mpi4py")
def test_a_killed_rank_ends_the_job_under_mpirun(sandbox: Sandbox, mpirun: list[str]) -> None:
    job = start(sandbox, [*mpirun, "-n", "3"], "mpi", "killed")
    try:
        strike(sandbox, job, "killed", signal.SIGKILL)
    finally:
        done = sandbox.finish(job)
    assert done.returncode != 0, done.stderr
    sandbox.wait_until_gone()

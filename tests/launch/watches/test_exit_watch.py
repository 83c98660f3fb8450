"""Workers that hold up a job: named, and ended, after limits that depend on what they do."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from farandole.errors import UserError
from farandole.launch.launcher import Job, Outcome, launch
from farandole.launch.outcome_text import print_outcome
from farandole.launch.watches import exit_watch

if TYPE_CHECKING:
    from conftest import Sandbox

PRELUDE = """
import os, signal, sys, time
from pathlib import Path

rank = int(os.environ["RANK"])
"""
Launched = Callable[..., tuple[Outcome, str]]


@pytest.fixture
def launched(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Launched:
    """Runs a job of two workers in this process: its outcome, and what the launcher has said."""
    monkeypatch.chdir(sandbox.folder)
    monkeypatch.setattr(tempfile, "tempdir", str(sandbox.temporary))

    def run(text: str, **more: Any) -> tuple[Outcome, str]:
        script = sandbox.script("worker.py", PRELUDE + text)
        outcome = launch(Job(2, [str(script)], sandbox.environment, **more))
        print_outcome(outcome, 2)
        assert sandbox.processes() == []
        lines = capfd.readouterr().err.splitlines()
        return outcome, "\n".join(line for line in lines if line.startswith("farandole: "))

    return run


def test_one_that_is_stopped_when_its_peer_is_done(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exit_watch, "_STOPPED_NAMED_SECONDS", 0.0)
    monkeypatch.setattr(exit_watch, "_STOPPED_SECONDS", 2.0)
    outcome, said = launched("if rank: os.kill(os.getpid(), signal.SIGSTOP)")
    assert outcome.exit_code == 137
    assert outcome.failed == (1,)
    named, cause, _ = said.splitlines()
    assert re.fullmatch(
        r"farandole: rank 1 \(process (\d+) on \S+\) is stopped \(SIGSTOP\); `kill -CONT \1` lets "
        r"it go on; it is ended when it has been so for 2 s",
        named,
    )
    assert re.fullmatch(
        r"farandole: rank 1 was stopped \(SIGSTOP\) for \d+ s after rank 0 was done", cause
    )


def test_one_that_runs_on_has_until_the_timeout(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exit_watch, "_NAMED_SECONDS", 0.0)
    outcome, said = launched("if not rank: time.sleep(600)", exit_seconds=2.0)
    assert (outcome.exit_code, outcome.failed) == (143, (0,))
    named, cause, _ = said.splitlines()
    assert re.fullmatch(
        r"farandole: waiting for rank 0 \(process \d+ on \S+, running\), \d+ s after rank 1 was "
        r"done; it is ended after 2 s \(--exit-timeout\)",
        named,
    )
    assert re.fullmatch(r"farandole: rank 0 still ran \d+ s after rank 1 was done", cause)


def test_without_a_timeout_only_one_that_does_nothing_is_ended(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exit_watch, "_IDLE_WINDOW_SECONDS", 1.0)
    monkeypatch.setattr(exit_watch, "_IDLE_SECONDS", 4.0)
    outcome, said = launched(
        """
import subprocess

if rank:
    code = "import time\\nend = time.monotonic() + 7\\nwhile time.monotonic() < end: pass"
    subprocess.run([sys.executable, "-S", "-c", code])  # it works, if by another's hands
    Path("worked").touch()
    time.sleep(600)
"""
    )
    assert outcome.exit_code == 143
    assert Path("worked").exists()
    assert re.search(r"rank 1 still ran \d+ s after rank 0 was done, the last \d+ s of them", said)


# Rank 0 says that rank 1 was lost, which is killed from outside: which end is seen first is chance.
LOST = """
from farandole.errors import CommError
from farandole.worker.failure import record_uncaught

def wait_for(name):
    while not Path(name).exists():
        time.sleep(0.01)

def lose_a_peer(*_):
    raise CommError("rank 1 was lost")

record_uncaught()
signal.signal(signal.SIGTERM, lose_a_peer if rank == 0 else signal.SIG_DFL)
Path(f"ready-{rank}").touch()
wait_for(f"ready-{1 - rank}")
"""
PEER_FIRST = """
if rank == 0:
    Path("pid").with_suffix(".half").write_text(str(os.getpid()))
    Path("pid").with_suffix(".half").rename("pid")
    lose_a_peer()
wait_for("pid")
zero = Path("/proc") / Path("pid").read_text() / "stat"
while zero.exists() and zero.read_text().split()[2] != "Z":
    time.sleep(0.01)
time.sleep(0.3)  # the launcher has seen rank 0's end, and looks for the cause
os.kill(os.getpid(), signal.SIGTERM)
"""
VICTIM_FIRST = """
if rank == 1:
    os.kill(os.getpid(), signal.SIGTERM)
time.sleep(600)
"""


@pytest.mark.parametrize("order", [PEER_FIRST, VICTIM_FIRST])
def test_a_signal_to_a_rank_is_the_cause_of_what_its_peer_says(
    launched: Launched, order: str
) -> None:
    outcome, said = launched(LOST + order)
    assert outcome.exit_code == 143
    assert said.splitlines()[0] == "farandole: rank 1 was killed by SIGTERM; the other was stopped"


def test_one_that_does_not_answer_because_it_is_stopped(sandbox: Sandbox) -> None:
    """The others notice after their timeout, and then nobody waits for it any more."""
    script = sandbox.script(
        "stopped.py",
        """
import os, signal, time
from pathlib import Path

import farandole as fd

run = fd.init(timeout=5)
run.group.barrier()
if run.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    run.group.barrier()
finally:
    Path("noticed").write_text(str(time.monotonic()))
""",
    )
    done = sandbox.farandole("run", "-n", "2", "--grace", "500", script)
    seconds = time.monotonic() - float((sandbox.folder / "noticed").read_text())
    assert done.returncode == 137
    assert seconds < 250, "no grace for a process that cannot hear of it"
    assert "CommError: barrier failed on rank 0 of 2: rank 1 did not answer" in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("farandole: ")]
    assert re.fullmatch(
        r"farandole: rank 1 \(process \d+ on \S+\) is stopped \(SIGSTOP\), and is ended", lines[-3]
    )
    assert lines[-2] == "farandole: rank 1 was stopped (SIGSTOP), and did not answer the others"


def test_no_time_is_no_limit(sandbox: Sandbox) -> None:
    done = sandbox.farandole("run", "--exit-timeout", "0", __file__)
    assert done.returncode == 2
    assert "--exit-timeout 0: give seconds above 0; inf: no limit." in done.stderr
    with pytest.raises(UserError, match=r"exit_seconds=-1: give the seconds, above 0"):
        Job(2, ["x.py"], exit_seconds=-1)

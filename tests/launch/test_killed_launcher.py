"""SIGKILL of a launcher: nothing of its job is left, whatever the job was doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from farandole.system.owned_folders import OwnedFolder
from farandole.system.watchdog import Watchdog

if TYPE_CHECKING:
    from conftest import Sandbox

STUCK = Path(__file__).parent / "scripts" / "stuck.py"  # in a collective, with a data loader
SET_UP = """
import os, subprocess, time
from pathlib import Path

subprocess.Popen(["sleep", "600"], start_new_session=True)  # of which the kernel knows nothing
if not os.fork():
    time.sleep(600)
Path(f"ready-{os.environ['RANK']}").touch()
time.sleep(600)
"""
# A launcher whose own parent does not reap it stays as a zombie.
KEEPER = """
import subprocess, sys, time
from pathlib import Path

launcher = subprocess.Popen([sys.executable, "-m", "farandole", *sys.argv[1:]])
Path("pid.half").write_text(str(launcher.pid))
Path("pid.half").rename("pid")
time.sleep(600)
"""


def start(sandbox: Sandbox, words: Sequence[str | Path], ranks: int) -> subprocess.Popen[str]:
    """`farandole` until its workers run."""
    launcher = sandbox.start_farandole(*words)
    ready = [sandbox.folder / f"ready-{rank}" for rank in range(ranks)]
    sandbox.wait_until(
        lambda: launcher.poll() is not None or all(path.exists() for path in ready), "workers run"
    )
    assert launcher.poll() is None, launcher.communicate()
    return launcher


def assert_nothing_is_left(sandbox: Sandbox) -> None:
    sandbox.wait_until_gone()
    assert list(sandbox.temporary.glob("farandole-*")) == []


@pytest.mark.parametrize(
    "words",
    [
        ("run", "-n", "2", STUCK),
        ("run", "-n", "3", "set_up.py"),
        ("run", "-n", "2", "--sync", "server", "--servers", "1", "set_up.py"),
        ("race", "-n", "2", "--sync", "allreduce", "set_up.py"),
    ],
    ids=["training", "forked", "servers", "race"],
)
def test_nothing_is_left(sandbox: Sandbox, words: Sequence[str | Path]) -> None:
    sandbox.script("set_up.py", SET_UP)
    launcher = start(sandbox, words, ranks=2)
    pids = {str(process.pid) for process in sandbox.processes()}
    launcher.kill()
    launcher.communicate()
    assert_nothing_is_left(sandbox)
    segments = [path.name for path in Path("/dev/shm").iterdir()]  # torch_<process id>_…
    assert [name for name in segments if pids.intersection(name.split("_"))] == []


def test_a_launcher_that_nobody_reaps(sandbox: Sandbox) -> None:
    script = sandbox.script("set_up.py", SET_UP)
    keeper = sandbox.start([sys.executable, "-c", KEEPER, "run", "-n", "1", str(script)])
    sandbox.wait_until((sandbox.folder / "ready-0").exists, "the worker runs")
    launcher = psutil.Process(int((sandbox.folder / "pid").read_text()))
    launcher.kill()
    sandbox.wait_until(
        lambda: [p.pid for p in sandbox.processes()] == [keeper.pid], "the job is gone"
    )
    assert launcher.status() == psutil.STATUS_ZOMBIE
    assert list(sandbox.temporary.glob("farandole-*")) == []
    keeper.kill()
    keeper.communicate()


def test_the_next_job_clears_up_where_the_watchdog_was_killed_too(sandbox: Sandbox) -> None:
    script = sandbox.script("set_up.py", SET_UP)
    launcher = start(sandbox, ["run", "-n", "1", script], ranks=1)
    for process in sandbox.processes():
        if "system/watchdog_process.py" in " ".join(process.cmdline()):
            process.kill()
    launcher.kill()
    launcher.communicate()
    assert len(list(sandbox.temporary.glob("farandole-logs-*"))) == 1
    done = sandbox.farandole("run", "-n", "1", sandbox.script("empty.py", ""))
    assert done.returncode == 0, done.stderr
    assert_nothing_is_left(sandbox)


def test_a_watchdog_leaves_alone_what_it_was_not_told_of(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(sandbox.temporary))
    monkeypatch.setattr("tempfile.tempdir", str(sandbox.temporary))
    theirs = sandbox.start(["sleep", "600"], FARANDOLE_JOB="other")
    ours = sandbox.start(["sleep", "600"], FARANDOLE_JOB="mine", RANK="1")
    folder = OwnedFolder("logs")
    variables = {"FARANDOLE_JOB": "mine", "RANK": "1"}
    saying = Watchdog(variables=variables, folders=[folder.path])
    assert saying.pid is not None
    os.kill(saying.pid, signal.SIGTERM)  # as a shell may send to all that it started
    saying.close()
    assert ours.poll() is None
    silent = Watchdog(variables=variables, folders=[folder.path])
    del silent  # it goes without a word
    assert ours.wait(150) == -signal.SIGKILL
    assert not folder.path.exists()
    assert theirs.poll() is None
    folder.close()
    for process in (ours, theirs):
        process.kill()
        process.communicate()

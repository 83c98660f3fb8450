"""`--stall`: workers that live and make no progress are named, with their stacks."""

from __future__ import annotations

import os
import re
import tempfile
from typing import TYPE_CHECKING

import pytest

from farandole.errors import UserError
from farandole.launch.launcher import Job, launch
from farandole.launch.watches import exit_watch

if TYPE_CHECKING:
    from conftest import Sandbox


def ours(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("farandole: ")]


@pytest.mark.parametrize("host", ["here", "there"])
def test_the_one_that_is_stuck_is_shown_and_ended(sandbox: Sandbox, host: str) -> None:
    """Rank 0 makes no step either: it waits for rank 1 in a collective. That is on this host, or on
    another, which `ssh` reaches; here it runs its command on this machine."""
    ssh = sandbox.folder / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text('#!/bin/sh\nfor command; do :; done\nexec setsid --wait sh -c "$command"\n')
    ssh.chmod(0o755)
    other = ("-H", "localhost:1,there:1", "--network-interfaces", "lo")
    where = ("-n", "2") if host == "here" else other
    script = sandbox.script(
        "stuck.py",
        """
import time
import torch
import farandole as fd

def lose_track():
    time.sleep(600)

run = fd.init(timeout=300)
for _ in run.loader(torch.zeros(4, 1), batch_size=1):
    pass
run.log(loss=0.0)
if run.rank == 1:
    lose_track()
run.group.barrier()
""",
    )
    path = f"{ssh.parent}:{os.environ['PATH']}"
    done = sandbox.farandole("run", *where, "--stall", "2", "--stall-kill", script, PATH=path)
    assert done.returncode == 143, done.stderr
    said = ours(done.stderr)
    what = r"farandole: rank {} \({}on \S+\) has made no step for 2 s, after 3"
    process = r"process \d+ "
    waits = re.compile(what.format(0, process) + ": it waits for other ranks")
    stuck = re.compile(
        what.format(1, process if host == "here" else "")
        + ", and does not wait for another rank; its stack:"
    )
    assert [bool(waits.fullmatch(line)) for line in said].count(True) == 1, said
    assert [bool(stuck.fullmatch(line)) for line in said].count(True) == 1, said
    # Before, while rank 1 still starts, all that are there may wait, and then all are shown.
    shown = done.stderr[done.stderr.index("its stack:") :]
    assert re.search(r'^\[1\]   File ".*stuck\.py", line \d+ in lose_track$', shown, re.M)
    assert not re.search(r"^\[0\]   File", shown, re.M)
    name = "rank 1" if host == "here" else "rank 1 on there"
    assert said[-2] == f"farandole: {name} made no step for 2 s, and did not wait for another rank"
    assert sandbox.processes() == []


def test_those_that_cannot_show_anything_are_named(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(sandbox.folder)
    monkeypatch.setattr(tempfile, "tempdir", str(sandbox.temporary))
    monkeypatch.setattr(exit_watch, "_STOPPED_SECONDS", 1.0)
    script = sandbox.script(
        "worker.py",
        """
import os, signal, time
from pathlib import Path

rank = int(os.environ["RANK"])
if rank == 3:  # never calls fd.init()
    while not Path("over").exists():
        time.sleep(0.01)
    raise SystemExit

from farandole.system.activity import show_activity, stack_file

if rank == 2:
    signal.signal(signal.SIGUSR2, lambda *_: None)
activity = show_activity(os.environ)
activity.step()
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
if rank == 0:
    activity.begin_wait()
    activity.end_wait()
    stack = stack_file(Path(os.environ["FARANDOLE_ACTIVITY"]))
    while not stack.exists() or not stack.stat().st_size:
        time.sleep(0.01)
    end = time.monotonic() + 10
    while time.monotonic() < end:
        activity.step()
        time.sleep(0.1)
    Path("over").touch()
while not Path("over").exists():
    time.sleep(0.01)
""",
    )
    outcome = launch(Job(4, [str(script)], sandbox.environment, stall_seconds=3.0))
    assert outcome.failure is not None
    assert outcome.failure.rank == 1  # it was stopped when the others were done
    shown = capfd.readouterr().err
    said = re.sub(r" \(process \d+ on \S+\)", "", "\n".join(ours(shown))).splitlines()
    stalled = "has made no step for 3 s, after 1"
    for line in (
        f"rank 0 {stalled}, and does not wait for another rank; its stack:",
        f"rank 1 {stalled}: it is stopped (SIGSTOP), and cannot print its stack",
        f"rank 2 {stalled}; the script has a use for SIGUSR2, so there is no stack",
        "rank 0 makes steps again",
    ):
        assert said.count(f"farandole: {line}") == 1, (line, shown)
    watched = re.findall(r"--stall cannot watch ranks? ([\d, ]+): no fd.init", shown)
    assert "3" in ", ".join(watched)
    assert re.search(r'^\[0\]   File ".*worker\.py", line \d+ in <module>$', shown, re.M)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--stall", "0"], "--stall 0: give the seconds without a step, above 0."),
        (["--stall-kill"], "--stall-kill: say with --stall SECONDS how long is too long."),
        (["--stall", "5", "--horovod"], "HOROVOD_STALL_CHECK_TIME_SECONDS"),
    ],
)
def test_what_cannot_be(sandbox: Sandbox, words: list[str], message: str) -> None:
    done = sandbox.farandole("run", *words, __file__)
    assert done.returncode == 2
    assert message in done.stderr


def test_jobs_that_cannot_be() -> None:
    with pytest.raises(UserError, match=r"stall_seconds=0 must be above 0"):
        Job(1, ["x.py"], stall_seconds=0.0)
    with pytest.raises(UserError, match="stall_kill=True: give stall_seconds too"):
        Job(1, ["x.py"], stall_kill=True)

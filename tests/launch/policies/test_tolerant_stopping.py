"""Jobs with parameter servers, from the shell: stopped or killed, nothing stays behind.

The servers are stand-ins that write down what happens to them; the workers are real.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Sandbox

# `farandole`, but with servers that only write down what they are told. The variable says what
# goes wrong with them.
FARANDOLE = """
import os, signal, sys, types
from farandole.cli import main
from farandole.errors import LaunchError

class Cluster:
    environment = {"FARANDOLE_SERVERS": "tcp://127.0.0.1:9", "FARANDOLE_SERVER_KEY": "k"}

    def __init__(self, **options):
        self.note(f"made {sorted(options.items())}")

    def note(self, text):
        with open("events", "a") as file:
            file.write(text + "\\n")

    def __enter__(self):
        self.note("start")
        if os.environ.get("WRONG") == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        return self

    def __exit__(self, *_):
        self.note("end")

    def lost(self, rank):
        self.note(f"lost {rank}")

    def restarted(self, rank):
        self.note(f"restarted {rank}")

    def check(self):
        if os.environ.get("WRONG") == "data" and os.path.exists("ready-1"):
            raise LaunchError("server 0 was killed by SIGKILL, and there is no replica")

sys.modules["farandole.server.cluster"] = types.SimpleNamespace(Cluster=Cluster)
main()
"""

# Each has a child of its own that a signal to the worker alone would not end.
STUCK = """
import os, subprocess, time
from pathlib import Path

child = subprocess.Popen(["sleep", "600"])
ready = Path(f"ready-{os.environ['RANK']}")
ready.with_suffix(".half").write_text(f"{os.getpid()} {child.pid}")
ready.with_suffix(".half").rename(ready)
time.sleep(600)
"""


class Job:
    """`farandole run -n 2 --servers 2` on a script."""

    def __init__(self, sandbox: Sandbox, text: str, *options: str, **variables: str) -> None:
        self.sandbox = sandbox
        launcher = sandbox.script("launcher.py", FARANDOLE)
        script = sandbox.script("script.py", text)
        run = ("run", "-n", "2", "--servers", "2", *options, script)
        self.process = sandbox.start([sys.executable, launcher, *run], **variables)

    def until_stuck(self) -> list[list[int]]:
        """The process ids of each rank: its own and its child's."""
        ready = [self.sandbox.folder / f"ready-{rank}" for rank in range(2)]
        self.sandbox.wait_until(
            lambda: self.process.poll() is not None or all(path.exists() for path in ready),
            "both workers run",
        )
        assert self.process.poll() is None, self.process.communicate()
        return [[int(pid) for pid in path.read_text().split()] for path in ready]

    def end(self) -> subprocess.CompletedProcess[str]:
        done = self.sandbox.finish(self.process)
        assert self.sandbox.processes() == []
        return done

    def events(self) -> list[str]:
        made, *rest = (self.sandbox.folder / "events").read_text().splitlines()
        assert made == "made [('functions', ()), ('replicas', 1), ('servers', 2), ('workers', 2)]"
        return rest


@pytest.mark.parametrize("number", [signal.SIGTERM])
def test_a_launcher_told_to_stop(sandbox: Sandbox, number: signal.Signals) -> None:
    job = Job(sandbox, STUCK)
    job.until_stuck()
    os.killpg(job.process.pid, number)
    done = job.end()
    assert done.returncode == 128 + number
    assert done.stderr == f"farandole: stopped by {number.name}; no worker is left\n"
    assert job.events() == ["start", "end"]
    assert list(sandbox.temporary.glob("farandole-*")) == []


def test_told_to_stop_while_the_servers_start(sandbox: Sandbox) -> None:
    job = Job(sandbox, STUCK, WRONG="signal")
    done = job.end()
    assert done.returncode == 143
    assert done.stderr == "farandole: stopped by SIGTERM; no worker is left\n"
    assert job.events() == ["start", "end"]
    assert not list(sandbox.folder.glob("ready-*"))


def test_a_second_ctrl_c_leaves_nothing_behind_either(sandbox: Sandbox) -> None:
    job = Job(
        sandbox,
        """
import os, signal, time
from pathlib import Path

def end(*_):
    Path(f"told-{os.environ['RANK']}").touch()
    while not Path("go").exists():
        time.sleep(0.01)
    raise SystemExit

signal.signal(signal.SIGTERM, end)
Path(f"ready-{os.environ['RANK']}").touch()
time.sleep(600)
""",
    )
    for word in ("ready", "told"):
        sandbox.wait_until(
            lambda word=word: all((sandbox.folder / f"{word}-{rank}").exists() for rank in (0, 1)),
            f"both workers are {word}",
        )
        os.killpg(job.process.pid, signal.SIGINT)
    (sandbox.folder / "go").touch()
    assert job.end().returncode == 130
    assert job.events() == ["start", "end"]


def test_a_worker_killed_outright_is_named_at_the_end(sandbox: Sandbox) -> None:
    job = Job(
        sandbox,
        """
import os, signal, time
from pathlib import Path

print(os.environ["FARANDOLE_SERVERS"], os.environ["FARANDOLE_SERVER_KEY"])
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
while "lost 1" not in Path("events").read_text():
    time.sleep(0.01)
""",
        *("--restarts", "1"),
    )
    done = job.end()
    assert done.returncode == 0
    variables = "tcp://127.0.0.1:9 k"
    lives = [f"[{rank}] {variables}" for rank in (0, 1, 1)]
    assert sorted(done.stdout.splitlines()) == lives
    first, *_, last = done.stderr.splitlines()
    assert first == "farandole: rank 1 was killed by SIGKILL; it is started again (1 of 1)"
    assert last.startswith("farandole: done, but without rank 1; every rank's output is in ")
    assert (Path(last.split()[-1]) / "rank-1.err").exists()
    assert job.events() == ["start", "lost 1", "restarted 1", "lost 1", "end"]


def test_rank_0s_traceback_comes_last(sandbox: Sandbox) -> None:
    job = Job(
        sandbox,
        """
import os, sys, time
from pathlib import Path

if os.environ["RANK"] == "1":
    sys.exit(3)
while "lost 1" not in Path("events").read_text():
    time.sleep(0.01)
raise ValueError("rank 0 is needed")
""",
    )
    done = job.end()
    assert done.returncode == 1
    ours = done.stderr[done.stderr.index("farandole: lost before the end: rank 1\n") :]
    assert "\nfarandole: rank 0 failed (exit code 1)\n" in ours
    *_, error, logs = ours.splitlines()
    assert error == "ValueError: rank 0 is needed"
    assert logs.startswith("farandole: every rank's output is in ")


def test_without_the_servers_data_there_is_no_job(sandbox: Sandbox) -> None:
    job = Job(sandbox, STUCK, WRONG="data")
    done = job.end()
    assert done.returncode == 1
    message = "farandole: server 0 was killed by SIGKILL, and there is no replica\n"
    assert done.stderr == message
    assert job.events() == ["start", "end"]
    assert list(sandbox.temporary.glob("farandole-*")) == []


def test_on_a_terminal_rank_0_writes_itself(sandbox: Sandbox) -> None:
    launcher = sandbox.script("launcher.py", FARANDOLE)
    script = sandbox.script("tty.py", "import sys\nprint(sys.stdout.isatty(), sys.stderr.isatty())")
    shown = sandbox.on_terminal(
        [sys.executable, launcher, "run", "-n", "2", "--servers", "1", script]
    )
    lines = [line for line in shown if "none of the 2 workers joined" not in line]
    assert sorted(lines) == ["", "True True", "[1] False False"]

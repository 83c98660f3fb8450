"""An agent alone, so that nobody else cleans up: what it passes on, and that it leaves nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import pytest

from farandole.launch.backends.remote.frames import (
    BEAT,
    END,
    ERRORS,
    FACTS,
    KILL,
    OUTPUT,
    SETUP,
    SIGNAL,
    START,
    STOP,
    encoded,
    read_frame,
    skip_to_mark,
)
from farandole.launch.backends.remote.orders import End, Order, Setup
from farandole.launch.host_facts import HostFacts, JobFiles, facts_of_this_host

if TYPE_CHECKING:
    from conftest import Sandbox

AGENT = [sys.executable, "-m", "farandole.launch.backends.remote.agent"]
# A child in a session of its own: no signal to the worker's group reaches it.
WAIT = (
    "import os, subprocess, time; from pathlib import Path; "
    "subprocess.Popen(['sleep', '600'], start_new_session=True); "
    "Path('half-' + os.environ['RANK']).write_text(str(os.getpid())); "
    "Path('half-' + os.environ['RANK']).rename('ready-' + os.environ['RANK']); time.sleep(600)"
)


class Launcher:
    """Talks to an agent of its own."""

    def __init__(self, sandbox: Sandbox, *command: str, **settings: object) -> None:
        self.sandbox = sandbox
        common: dict[str, object] = {
            "command": [sys.executable, *command],
            "folder": str(sandbox.folder),
            "variables": {"MASTER_ADDR": "127.0.0.1", "MINE": "ä 'b'\n$c"},
            "identity": sandbox.mark,
            "worker_variable": "RANK",
            "workers": 2,
            "script": None,
            "files": [],
            "in_one_stream": False,
            "grace_seconds": 60.0,
            "may_fork": False,
            "watches_activity": False,
            "silence_seconds": 300.0,
        }
        self.process = subprocess.Popen(
            AGENT, env=sandbox.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.send(SETUP, 0, Setup(**{**common, **settings}).to_json())  # type: ignore[arg-type]
        assert skip_to_mark(self.stdout)
        frame = read_frame(self.stdout)
        assert frame is not None
        assert frame.kind == FACTS
        self.facts = HostFacts.from_json(frame.content)

    def send(self, kind: bytes, number: int = 0, content: bytes = b"") -> None:
        self.stdin.write(encoded(kind, number, content))
        self.stdin.flush()

    def start(self, *numbers: int) -> None:
        for number in numbers:
            self.send(START, number, Order(2, {"RANK": str(number)}).to_json())

    def wait_until_ready(self, *numbers: int) -> list[int]:
        paths = [self.sandbox.folder / f"ready-{number}" for number in numbers]
        self.sandbox.wait_until(lambda: all(path.exists() for path in paths), "workers run")
        return [int(path.read_text()) for path in paths]

    def read(self, ends: int) -> tuple[dict[tuple[bytes, int], bytes], dict[int, End]]:
        """What comes until so many workers have ended."""
        found: dict[tuple[bytes, int], bytes] = {}
        ended: dict[int, End] = {}
        while len(ended) < ends:
            frame = read_frame(self.stdout)
            assert frame is not None, "the agent has gone"
            kind, number, content = frame
            if kind == END:
                ended[number] = End.from_json(content)
            else:
                found[kind, number] = found.get((kind, number), b"") + content
        return found, ended

    def close(self) -> int:
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        code = self.process.wait(150)
        self.stdout.close()
        return code


@pytest.fixture
def launchers() -> Iterator[list[Launcher]]:
    opened: list[Launcher] = []
    yield opened
    for each in opened:
        each.process.kill()
        each.close()


def test_output_of_any_bytes_ends_and_errors_of_several_workers(sandbox: Sandbox) -> None:
    """One dies of a signal and leaves a child, the other raises; a third cannot be started."""
    program = (
        "import json, os, signal, subprocess, sys; from pathlib import Path; "
        "subprocess.Popen(['sleep', '600'], start_new_session=True); "
        "sys.stdout.buffer.write(bytes(range(256)) * 4096 + os.environ['RANK'].encode()); "
        "sys.stdout.flush(); print(os.environ['MINE'], file=sys.stderr); "
        "Path(os.environ['TORCHELASTIC_ERROR_FILE']).write_text('told'); "
        "sys.exit(3) if os.environ['RANK'] == '4' else os.kill(os.getpid(), signal.SIGKILL)"
    )
    launcher = Launcher(sandbox, "-c", program)
    launcher.start(3, 4)
    launcher.send(BEAT)
    found, ended = launcher.read(2)
    assert ended == {3: End(-signal.SIGKILL, "told"), 4: End(3, "told")}
    for number in (3, 4):
        assert found[OUTPUT, number] == bytes(range(256)) * 4096 + str(number).encode()
        assert found[ERRORS, number].decode() == "ä 'b'\n$c\n"
    assert found[BEAT, 0] == b""
    assert launcher.close() == 0
    assert sandbox.processes() == []


def test_a_program_or_a_folder_that_is_not_there(sandbox: Sandbox) -> None:
    for settings in ({"command": ["/nowhere/python"]}, {"folder": "/nowhere"}):
        launcher = Launcher(sandbox, "-c", "", **settings)
        launcher.start(0)
        found, ended = launcher.read(1)
        assert ended == {0: End(127)}
        assert b"cannot start" in found[ERRORS, 0]
        assert b"/nowhere" in found[ERRORS, 0]
        assert launcher.close() == 0


def test_one_worker_is_signalled_stopped_or_killed(sandbox: Sandbox) -> None:
    program = (
        "import os, signal, sys, time; from pathlib import Path; "
        "signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b'warned')); "
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); "
        "Path('half-' + os.environ['RANK']).write_text(str(os.getpid())); "
        "Path('half-' + os.environ['RANK']).rename('ready-' + os.environ['RANK']); "
        "time.sleep(600); time.sleep(600)"
    )
    launcher = Launcher(sandbox, "-c", program)
    launcher.start(0, 1, 2)
    pids = launcher.wait_until_ready(0, 1, 2)
    launcher.send(SIGNAL, 0, str(int(signal.SIGUSR1)).encode())
    frame = read_frame(launcher.stdout)
    assert frame == (OUTPUT, 0, b"warned")
    os.kill(pids[2], signal.SIGSTOP)  # it would not hear of SIGTERM
    launcher.send(STOP, 2)
    launcher.send(KILL, 1)
    launcher.send(STOP, 0)
    _, ended = launcher.read(3)
    assert {number: end.exit_code for number, end in ended.items()} == {
        0: 7,
        1: -signal.SIGKILL,
        2: -signal.SIGKILL,
    }
    assert launcher.close() == 0


@pytest.mark.parametrize("how", ["stdin", "silence", "signal", "SIGKILL", "unread"])
def test_whatever_ends_it_nothing_is_left(
    sandbox: Sandbox, launchers: list[Launcher], how: str
) -> None:
    command = WAIT
    if how == "unread":  # a launcher that does not read, and then goes
        command = WAIT.replace("time.sleep(600)", "print('x' * 2**23)")
    launcher = Launcher(sandbox, "-c", command, silence_seconds=2.0 if how == "silence" else 300.0)
    launchers.append(launcher)
    launcher.start(0, 1)
    if how != "silence":  # then they may not even have begun
        pids = set(launcher.wait_until_ready(0, 1))
    if how in ("stdin", "unread"):
        launcher.stdin.close()
    elif how == "signal":
        launcher.process.terminate()
    elif how == "SIGKILL":
        launcher.process.kill()
    if how == "unread":
        sandbox.wait_until(
            lambda: not {process.pid for process in sandbox.processes()} & pids, "workers end"
        )
        launcher.stdout.close()
    sandbox.wait_until_gone()
    code = launcher.process.wait(150)
    assert code == (-signal.SIGKILL if how == "SIGKILL" else 0)


def test_it_shares_one_import_of_torch_and_knows_its_host(sandbox: Sandbox) -> None:
    script = sandbox.script(
        "train.py",
        "import sys\nfinder = type(sys.meta_path[0]).__name__\nimport json, os, torch\n"
        "print(json.dumps([finder, torch.get_num_threads(), os.environ['RANK'], sys.argv]))\n",
    )
    command = [sys.executable, "train.py", "a b"]
    launcher = Launcher(sandbox, command=command, may_fork=True, script=str(script))
    launcher.start(0, 1)
    found, ended = launcher.read(2)
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert {number: end.exit_code for number, end in ended.items()} == {0: 0, 1: 0}, found
    for number in (0, 1):
        seen = json.loads(found[OUTPUT, number])
        assert seen == ["Preloaded", threads, str(number), ["train.py", "a b"]]
    assert launcher.close() == 0
    here = facts_of_this_host(JobFiles("/", str(script)))
    assert _without_clock(launcher.facts) == _without_clock(here)
    assert abs(launcher.facts.clock_seconds - here.clock_seconds) < 1000
    assert here.script is not None
    assert here.torch is not None


def _without_clock(facts: HostFacts) -> Mapping[str, object]:
    return {name: value for name, value in vars(facts).items() if name != "clock_seconds"}

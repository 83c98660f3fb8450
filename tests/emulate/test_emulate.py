"""`farandole emulate`: what the hosts run, how it ends, and that nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result

from farandole.cli.emulate import emulate
from farandole.emulate import namespaces
from farandole.errors import UserError

if TYPE_CHECKING:
    from conftest import Sandbox


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(emulate, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert namespaces.existing(f"farandole-{os.getpid()}-") == []
    return result


def test_each_host_runs_the_command_as_itself(root: None) -> None:
    script = "echo {host} of {hosts}, $(hostname), {master}, ${host}$MASTER_ADDR; echo oops >&2"
    done = run("--hosts", "3", "--rate", "100mbit", "--", "sh", "-c", script)
    assert done.exit_code == 0, done.output
    assert sorted(done.stdout.splitlines()) == [
        f"[emulated-{host}] {host} of 3, emulated-{host}, 198.18.0.1, 198.18.0.1"
        for host in range(3)
    ]
    assert sorted(done.stderr.splitlines()) == [f"[emulated-{host}] oops" for host in range(3)]


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [("exit 7", 7, "exit code 7"), ("kill -KILL $$", 137, "killed by SIGKILL")],
)
def test_the_first_host_to_fail_stops_the_others(
    root: None, end: str, code: int, words: str
) -> None:
    script = f"if [ {{host}} = 1 ]; then {end}; fi; echo waiting; exec sleep 600"
    done = run("--hosts", "3", "--", "sh", "-c", script)
    assert done.exit_code == code
    assert f"farandole: host emulated-1 failed ({words})" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--hosts", "17", "--", "true"], "17 emulated hosts"),
        (["--rate", "1gb", "--", "true"], "rate '1gb'"),
        (["--delay", "soon", "--", "true"], "delay 'soon'"),
        (["--network", "10.0.0.0", "--", "true"], "network 10.0.0.0"),
        ([], "Give a command after --"),
        (["--", "no-such-command-{host}"], "'no-such-command-"),
        (["--clean", "--", "true"], "leave 'true' out"),
    ],
)
def test_bad_input(arguments: list[str], complaint: str) -> None:
    error = CliRunner().invoke(emulate, arguments).exception
    assert isinstance(error, UserError)
    assert complaint in str(error)


@pytest.mark.parametrize("arguments", [["--", "true"], ["--clean"]])
def test_without_root(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    error = CliRunner().invoke(emulate, arguments).exception
    assert isinstance(error, UserError)
    assert "need root" in str(error)
    assert "sudo" in str(error)


def start_waiting(sandbox: Sandbox) -> subprocess.Popen[str]:
    """An emulator whose two hosts wait for ever, each with a daemon beside the command."""
    command = "from farandole.cli.emulate import emulate; emulate()"
    script = "setsid sleep 600 & touch ready-{host}; exec sleep 600"
    emulator = sandbox.start([sys.executable, "-c", command, "--", "sh", "-c", script])
    ready = [sandbox.folder / f"ready-{host}" for host in range(2)]
    sandbox.wait_until(
        lambda: emulator.poll() is not None or all(path.exists() for path in ready), "hosts wait"
    )
    assert emulator.poll() is None, emulator.communicate()
    assert len(namespaces.existing(f"farandole-{emulator.pid}-")) == 3
    assert len(sandbox.processes()) >= 5
    return emulator


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_emulator_told_to_stop(root: None, sandbox: Sandbox, number: signal.Signals) -> None:
    emulator = start_waiting(sandbox)
    os.killpg(emulator.pid, number)
    done = sandbox.finish(emulator)
    assert done.returncode == 128 + number
    assert f"farandole: stopped by {number.name}; no host is left" in done.stderr
    assert "Traceback" not in done.stderr
    assert namespaces.existing(f"farandole-{emulator.pid}-") == []
    assert sandbox.processes() == []
    assert list(sandbox.temporary.iterdir()) == []


def test_nothing_is_left_of_an_emulator_that_was_killed(root: None, sandbox: Sandbox) -> None:
    emulator = start_waiting(sandbox)
    emulator.kill()
    emulator.communicate()
    sandbox.wait_until_gone()
    assert namespaces.existing(f"farandole-{emulator.pid}-") == []
    assert list(sandbox.temporary.iterdir()) == []


def test_the_next_emulator_removes_what_nobody_else_could(root: None, sandbox: Sandbox) -> None:
    emulator = start_waiting(sandbox)
    (watchdog,) = [
        p for p in sandbox.processes() if "system/watchdog_process.py" in " ".join(p.cmdline())
    ]
    watchdog.kill()
    emulator.kill()
    emulator.communicate()
    assert len(namespaces.existing(f"farandole-{emulator.pid}-")) == 3
    done = sandbox.python("-m", "farandole", "emulate", "--hosts", "1", "--", "true")
    assert done.returncode == 0, done.stderr
    assert namespaces.existing(f"farandole-{emulator.pid}-") == []
    sandbox.wait_until_gone()
    assert list(sandbox.temporary.iterdir()) == []

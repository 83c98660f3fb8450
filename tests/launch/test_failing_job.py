"""A job that fails: the first failing rank is named, its traceback is last, its code is ours."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Sandbox

FAIL = Path(__file__).parent / "scripts" / "fail.py"


def last_words(done: subprocess.CompletedProcess[str]) -> str:
    """What the launcher says after all output of the workers."""
    *before, last = done.stderr.split("\nfarandole: rank ")
    assert before, done.stderr
    for line in last.splitlines():
        assert not re.match(r"\[\d+\] ", line), f"a worker speaks after the launcher: {line}"
    return last


def logs_of(done: subprocess.CompletedProcess[str]) -> Path:
    match = re.search(r"^farandole: every rank's output is in (.*)$", done.stderr, re.MULTILINE)
    assert match, done.stderr
    return Path(match[1])


def test_others_fail_because_one_did(sandbox: Sandbox) -> None:
    """One of them by what our own collective raises, one by something of its own."""
    done = sandbox.farandole("run", "-n", "3", FAIL, "raise")
    last = last_words(done)
    assert done.returncode == 1
    assert last.startswith("2 failed (exit code 1); the other 2 were stopped\nTraceback")
    assert f'File "{FAIL}", line' in last
    assert "\nValueError: the first to fail\n" in last
    assert "CommError" not in last
    assert "one that follows" not in last
    assert "[2] ValueError: the first to fail" in done.stderr  # where it happened, too
    logs = logs_of(done)
    assert logs.parent == sandbox.temporary
    assert "ValueError: the first to fail" in (logs / "rank-2.err").read_text()


@pytest.mark.parametrize(("how", "code"), [("exit", 3), ("linger", 3), ("vanish", 4)])
def test_leaving_with_a_code_is_the_cause_of_what_follows(
    sandbox: Sandbox, how: str, code: int
) -> None:
    done = sandbox.farandole("run", "-n", "2", FAIL, how)
    assert done.returncode == code
    assert last_words(done).startswith(f"1 failed (exit code {code}); the other was stopped\n")


def test_failing_before_init_while_the_other_waits_in_it(sandbox: Sandbox) -> None:
    done = sandbox.farandole("run", "-n", "2", FAIL, "before")
    last = last_words(done)
    assert done.returncode == 1
    assert last.startswith("1 failed (exit code 1)")
    assert "ModuleNotFoundError: No module named 'no_such_module'" in last


def test_a_syntax_error(sandbox: Sandbox) -> None:
    script = sandbox.script("wrong.py", "print('never'\n")
    done = sandbox.farandole("run", "-n", "2", script)
    assert done.returncode == 1
    assert "SyntaxError: '(' was never closed" in last_words(done)
    assert done.stdout == ""


def test_a_signal_of_its_own(sandbox: Sandbox) -> None:
    script = sandbox.script(
        "crash.py",
        """
import os, signal, sys, time

print("before the crash", file=sys.stderr)
if os.environ["RANK"] == "0":
    time.sleep(600)
os.kill(os.getpid(), signal.SIGSEGV)
""",
    )
    done = sandbox.farandole("run", "-n", "2", script)
    assert done.returncode == 128 + signal.SIGSEGV
    last = last_words(done)
    assert last.startswith("1 was killed by SIGSEGV; the other was stopped\n")
    assert "before the crash" in last

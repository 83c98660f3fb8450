"""What the tests stand on: warm processes look fresh, long files come first, quick finds tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.support import order, quick, stand_ins
from tests.support.crashes import kept_stacks
from tests.support.warm_starts import fresh_starts

if TYPE_CHECKING:
    from conftest import Sandbox

FACTS = """
import json, os, signal, sys
from pathlib import Path

def shown(what):
    return [text for text in Path(f"/proc/self/{what}").read_text().split("\\0") if text]

facts = {
    "warm": "Preloaded" in {type(finder).__name__ for finder in sys.meta_path},
    "torch": "torch" in sys.modules,
    "arguments": sys.argv,
    "variables": sorted(map("=".join, os.environ.items())),
    "shown": sorted(shown("environ")),
    "folder": os.getcwd(),
    "parent": os.getppid(),
    "leads": os.getsid(0) == os.getpid(),
    "path": sys.path[0],
    "name": __name__,
    "ignored": signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN,
    "given": os.read(int(sys.argv[1]), 9).decode(),
    "open": sorted(int(name) for name in os.listdir("/proc/self/fd"))[:3],
}
import torch
facts["threads"] = torch.get_num_threads()
print(json.dumps(facts))
sys.stderr.write("to standard error\\n")
sys.exit(7)
"""


def start(folder: Path, script: Path, variables: Mapping[str, str]) -> tuple[int, dict, str]:
    reading, writing = os.pipe()
    os.write(writing, b"for you")
    with subprocess.Popen(
        [sys.executable, script.name, str(reading), "two words"],
        cwd=folder,
        env=variables,
        pass_fds=[reading],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    ) as process:
        out, err = process.communicate(timeout=300)
    os.close(reading)
    os.close(writing)
    facts = json.loads(out)
    facts["arguments"].pop(1)  # the number of the descriptor
    return process.returncode, facts, err


@pytest.mark.parametrize("more", [{}, {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}])
def test_a_warm_process_is_as_a_fresh_one(tmp_path: Path, more: Mapping[str, str]) -> None:
    script = tmp_path / "facts.py"
    script.write_text(FACTS)
    root = str(Path(__file__).parents[1])
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "HOME") if name in os.environ}
    for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "OMP_WAIT_POLICY"):
        kept |= {name: os.environ[name]} if name in os.environ else {}
    variables = kept | {"PYTHONPATH": root, "OF_MY_OWN": "1"} | dict(more)
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        code, warm, err = start(tmp_path, script, variables)
        with fresh_starts():
            fresh = start(tmp_path, script, variables)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert warm.pop("warm"), "else nothing is compared"
    assert not fresh[1].pop("warm")
    for _, facts, _ in (fresh, (code, warm, err)):  # what Python sets itself in a C locale
        for name in ("variables", "shown"):
            facts[name] = [text for text in facts[name] if not text.startswith("LC_CTYPE=")]
    for name, value in fresh[1].items():
        assert warm[name] == value, name
    assert (code, warm, err) == fresh
    assert warm["parent"] == os.getpid()
    assert not warm["torch"], "as if it were not imported"


def test_a_warm_process_is_killed_and_seen_as_any_other(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text("import time\nprint('ready', flush=True)\ntime.sleep(600)\n")
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert str(script) in " ".join(psutil.Process(process.pid).cmdline())
    process.kill()
    assert process.wait(150) == -signal.SIGKILL
    process.stdout.close()


BY_A_SHELL = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable]
SIGNALLED = """
import os, signal, sys, time
def leave(*_):
    os.write(1, b"left\\n")  # it may come in the middle of the print below
    sys.exit(5)
signal.signal(signal.SIGTERM, leave)
print(os.getpid(), os.getppid(), "Preloaded" in str(sys.meta_path), flush=True)
time.sleep(600)
"""


def test_what_a_shell_starts_is_forked_too(
    sandbox: Sandbox, warm_variables: Mapping[str, str]
) -> None:
    text = FACTS.replace("os.read(int(sys.argv[1]), 9).decode()", '""')
    script = sandbox.script("facts.py", text)
    found = []
    for variables in (warm_variables, {**warm_variables, stand_ins.VARIABLE: "nowhere"}):
        done = sandbox.run([*BY_A_SHELL, script, "two words"], **variables)
        assert (done.returncode, done.stderr) == (7, "to standard error\n")
        facts = json.loads(done.stdout)
        facts.pop("parent")
        for name in ("variables", "shown"):
            own = ("LC_CTYPE=", f"{stand_ins.VARIABLE}=", "_=")
            facts[name] = [each for each in facts[name] if not each.startswith(own)]
        found.append(facts)
    warm, fresh = found
    assert warm.pop("warm"), "else nothing is compared"
    assert not fresh.pop("warm")
    assert warm == fresh


@pytest.mark.parametrize(
    ("victim", "number", "code"),
    [
        ("stand-in", signal.SIGTERM, 5),
        ("stand-in", signal.SIGKILL, 128 + signal.SIGKILL),
        ("script", signal.SIGKILL, 128 + signal.SIGKILL),
    ],
)
def test_a_stand_in_and_its_script_end_together(
    sandbox: Sandbox,
    warm_variables: Mapping[str, str],
    victim: str,
    number: signal.Signals,
    code: int,
) -> None:
    shell = sandbox.start([*BY_A_SHELL, sandbox.script("waits.py", SIGNALLED)], **warm_variables)
    assert shell.stdout is not None
    script, keeper, warm = shell.stdout.readline().split()
    assert warm == "True", "else nobody stands in for it"
    (stand_in,) = psutil.Process(shell.pid).children()
    assert stand_in.pid not in (int(script), int(keeper))
    os.kill(stand_in.pid if victim == "stand-in" else int(script), number)
    done = sandbox.finish(shell)
    assert done.returncode == code
    assert done.stdout == ("left\n" if code == 5 else "")
    sandbox.wait_until_gone()


def test_workers_of_a_larger_job_are_forked_too(sandbox: Sandbox) -> None:
    """Three start from a fork server of their launcher, which is itself forked from a warm one."""
    script = sandbox.script(
        "finders.py", "import sys\nprint([type(finder).__name__ for finder in sys.meta_path])"
    )
    done = sandbox.farandole("run", "-n", "3", script)
    assert done.returncode == 0, done.stderr
    assert sum("Preloaded" in line for line in done.stdout.splitlines()) == 3, done.stdout


def test_long_files_come_first_and_no_test_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "WEIGHTS", {"long": 50.0, "longer": 60.0})
    tests = [(file, number) for file in ("a", "long", "b", "longer", "c") for number in range(3)]
    found = order.ordered(tests, lambda test: test[0], 2)
    assert sorted(found) == sorted(tests)
    assert found[:3] == [("longer", number) for number in range(3)]
    assert found[found.index(("long", 0)) - 1][0] != "longer", "each worker begins with one of them"


def test_weights_are_of_files_that_exist() -> None:
    root = Path(order.__file__).parents[2]
    assert [file for file in order.WEIGHTS if not (root / file).is_file()] == []


@pytest.fixture(scope="module")
def known() -> dict[str, set[str]]:
    """All test files, read once."""
    return quick.tests()


@pytest.mark.parametrize(
    ("changed", "chosen", "not_chosen"),
    [
        ("farandole/options.py", "test_options.py", "test_readme.py"),
        ("farandole/sync/periodic/adacomm.py", "test_adacomm.py", "test_readme.py"),
        ("docs/running.md", "test_readme.py", "test_options.py"),
        ("tests/test_options.py", "test_options.py", "test_readme.py"),
        ("tests/docs/helper.py", "test_readme.py", "test_options.py"),
    ],
)
def test_quick_finds_the_tests_of_a_change(
    known: dict[str, set[str]], changed: str, chosen: str, not_chosen: str
) -> None:
    found = {Path(file).name for file in quick.choose([changed], known)}
    assert chosen in found
    assert not_chosen not in found


def test_quick_finds_some_for_every_module(known: dict[str, set[str]]) -> None:
    root = Path(__file__).parents[1]
    modules = [str(path.relative_to(root)) for path in sorted((root / "farandole").rglob("*.py"))]
    assert [module for module in modules if not quick.choose([module], known)] == []


DYING = """
import faulthandler, sys
from pathlib import Path
from tests.support.crashes import keep_stacks
keep_stacks(Path(), sys.argv[1])
if sys.argv[1] == "gw1":
    faulthandler._sigsegv()
"""


def test_a_worker_that_dies_says_where_it_was(sandbox: Sandbox) -> None:
    script = sandbox.script("dying.py", DYING)
    assert sandbox.python(script, "gw0").returncode == 0
    assert sandbox.python(script, "gw1").returncode == -signal.SIGSEGV
    ((worker, lines),) = kept_stacks(sandbox.folder)
    assert worker == "gw1"
    assert lines[0] == "Fatal Python error: Segmentation fault"
    assert f'File "{script}", line 7 in <module>' in "\n".join(lines)

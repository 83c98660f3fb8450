"""Hosts that cannot take part in a job: what is wrong there is named, and nothing starts.

The `ssh` of these tests runs its command on this machine, changed in one respect. Real servers are
in `tests/cli/test_several_hosts.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.ssh_stub import path_with_ssh

if TYPE_CHECKING:
    from conftest import Sandbox

SCRIPT = "from pathlib import Path; Path('started').touch()"
HOSTS = ("-H", "localhost:1,there:1", "--network-interfaces", "lo")
LATE = "import time; real = time.time; time.time = lambda: real() + 3600"
DEAF = """
import socket

def refuse(self, where):
    raise PermissionError("a firewall")

socket.socket.connect = refuse
"""


def another_module_path(sandbox: Sandbox) -> str:
    """Shell commands that put a folder before all others in which Python looks for modules."""
    (sandbox.folder / "other").mkdir()
    return f'command=$(echo "$command" | sed "s,PYTHONPATH=,&{sandbox.folder}/other:,")'


def refused(sandbox: Sandbox, before: str) -> str:
    """What `farandole run` says. Nothing has started."""
    path = path_with_ssh(sandbox, before)
    sandbox.script("train.py", SCRIPT)
    done = sandbox.farandole("run", *HOSTS, "train.py", PATH=path)
    assert sandbox.processes() == []
    assert not (sandbox.folder / "started").exists()
    assert done.returncode == 1, done.stderr
    first, *problems = done.stderr.splitlines()
    assert first == "farandole: the job was not started."
    return "\n".join(problems)


def test_another_torch(sandbox: Sandbox) -> None:
    before = another_module_path(sandbox)
    info = sandbox.folder / "other" / "torch-1.2.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.2.3\n")
    assert refused(sandbox, before).startswith("host there: it has torch 1.2.3, and this host has")


def test_a_clock_that_is_off_by_an_hour(sandbox: Sandbox) -> None:
    before = another_module_path(sandbox)
    (sandbox.folder / "other" / "sitecustomize.py").write_text(LATE)
    said = refused(sandbox, before)
    assert said.startswith("host there: its clock is 60 minutes ahead of this host's. Set it")


def test_no_python_and_no_farandole_there(sandbox: Sandbox) -> None:
    before = 'case "$command" in *) command="env /nowhere/python -m x";; esac'
    said = refused(sandbox, before)
    assert said.startswith("host there: there is no Python at ")
    assert "/nowhere/python" in said


def test_farandole_that_does_not_start_there(sandbox: Sandbox) -> None:
    before = another_module_path(sandbox)
    package = sandbox.folder / "other" / "farandole"
    package.mkdir()
    (package / "__init__.py").write_text("")
    said = refused(sandbox, before)
    assert said.startswith("host there: Farandole does not start there: ")
    assert "Install the same version there, in the same Python." in said


def test_a_script_that_is_missing_there(sandbox: Sandbox) -> None:
    # The launcher has read it by then, and no worker of this host has started.
    said = refused(sandbox, "mv train.py moved.py")
    assert said.startswith("host there: the script train.py is not there (in ")


def test_a_launcher_that_cannot_be_reached(sandbox: Sandbox) -> None:
    before = another_module_path(sandbox)
    (sandbox.folder / "other" / "sitecustomize.py").write_text(DEAF)
    said = refused(sandbox, before)
    assert said.startswith("host there: it cannot connect to this host at 127.0.0.1:")
    assert "a firewall. Let it connect to this host (firewall), or name the interface" in said


def test_all_hosts_are_named_at_once_and_ssh_never_asks(sandbox: Sandbox) -> None:
    """One does not let us in, and one has no Farandole. The third would do, and starts nothing."""
    before = """case "$*" in
        *" there env "*) echo 'ann@there: Permission denied (publickey,password).' >&2; exit 255;;
        *" here env "*) command="exit 3";;
    esac
    echo "$*" >> ssh.log"""
    path = path_with_ssh(sandbox, before)
    sandbox.script("train.py", SCRIPT)
    hosts = ("-H", "localhost:1,there:1,here:1,near:1", "--network-interfaces", "lo")
    done = sandbox.farandole("run", *hosts, "train.py", PATH=path)
    assert sandbox.processes() == []
    assert not (sandbox.folder / "started").exists()
    assert done.returncode == 1
    first, *problems = done.stderr.splitlines()
    assert first == "farandole: the job was not started."
    assert [problem.split(":")[0] for problem in problems] == ["host there", "host here"]
    assert "(publickey,password). Try `ssh -o BatchMode=yes there true`" in problems[0]
    assert "does not start there: it said nothing (exit code 3)" in problems[1]
    assert "-o BatchMode=yes" in (sandbox.folder / "ssh.log").read_text()

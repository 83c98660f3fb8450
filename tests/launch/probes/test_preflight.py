"""The look at other hosts before a job starts: what is wrong there is named, and nothing starts.

The `ssh` of these tests runs its command on this machine, changed in one respect. Real servers are
in `tests/cli/test_several_hosts.py`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from farandole.errors import LaunchError
from farandole.launch.backends.ssh.channel import Ssh
from farandole.launch.probes import session
from farandole.launch.probes.host_check import JobFiles
from farandole.launch.probes.session import ProbeError, ProbeSession

if TYPE_CHECKING:
    from conftest import Sandbox

SCRIPT = "from pathlib import Path; Path('started').touch()"
HOSTS = ("-H", "localhost:1,there:1", "--network-interfaces", "lo")
LATE = "import time; real = time.time; time.time = lambda: real() + 3600"


def path_with_ssh(sandbox: Sandbox, before: str) -> str:
    """A PATH on which `ssh` runs its last word here, after the shell commands `before`."""
    folder = sandbox.folder / "bin"
    folder.mkdir()
    run = 'exec setsid --wait sh -c "$command"'
    (folder / "ssh").write_text(f"#!/bin/sh\nfor command; do :; done\n{before}\n{run}\n")
    (folder / "ssh").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


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
    assert said.endswith("Install the same version there, in the same Python.")


def test_a_script_that_is_missing_there(sandbox: Sandbox) -> None:
    # Another root for the paths of the job: the folder is there, and the script is not.
    empty = sandbox.folder / "empty"
    empty.mkdir()
    change = f'sed -u "s,{sandbox.folder}\\",{empty}\\","'
    before = f'exec 3<&0; {change} <&3 | setsid --wait sh -c "$command"; exit'
    said = refused(sandbox, before)
    assert said.startswith("host there: the script train.py is not there (in ")


def test_a_race_that_cannot_read_what_rank_0_writes(sandbox: Sandbox) -> None:
    """The other host has the script, and does not see what this one writes."""
    path = path_with_ssh(sandbox, "rm -f runs/*/.farandole-*")
    sandbox.script("train.py", SCRIPT)
    there = ("-H", "there:1", "--network-interfaces", "lo", "--sync", "allreduce")
    done = sandbox.farandole("race", *there, "train.py", PATH=path)
    assert done.returncode == 1
    assert "host there: it does not see this host's folder " in done.stderr
    assert "Rank 0 of each lane is on host there" in done.stderr
    assert not (sandbox.folder / "runs").exists()


def test_a_host_that_prints_something_else(sandbox: Sandbox) -> None:
    said = refused(sandbox, "echo welcome")
    assert said.startswith("host there: its answer is not understood: b'welcome\\n'.")


def test_a_host_that_never_answers(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", path_with_ssh(sandbox, "exec sleep 600"))
    monkeypatch.setattr(session, "_START_SECONDS", 0.2)
    monkeypatch.setattr(session, "_ANSWER_SECONDS", 0.2)
    with ProbeSession("there", Ssh(connect_seconds=0)) as probe:
        with pytest.raises(ProbeError, match=r"there: it did not answer within 0.2 s\. Try `ssh "):
            probe.facts(JobFiles("/"))
        process = probe._process
    assert process.poll() is not None


def test_there_is_no_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match=r"cannot start ssh to host there.*Install an ssh client"):
        ProbeSession("there", Ssh())

"""Probes of other hosts. The `ssh` of these tests runs its command on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from farandole.errors import LaunchError
from farandole.launch.backends.ssh.channel import Ssh
from farandole.launch.host_facts import JobFiles
from farandole.launch.probes import session
from farandole.launch.probes.session import ProbeError, ProbeSession
from tests.support.ssh_stub import path_with_ssh

if TYPE_CHECKING:
    from conftest import Sandbox


def test_a_race_that_cannot_read_what_rank_0_writes(sandbox: Sandbox) -> None:
    """The other host has the script, and does not see what this one writes. Its shell talks."""
    path = path_with_ssh(sandbox, "echo welcome; rm -f runs/*/.farandole-*")
    sandbox.script("train.py", "from pathlib import Path; Path('started').touch()")
    there = ("-H", "there:1", "--network-interfaces", "lo", "--sync", "allreduce")
    done = sandbox.farandole("race", *there, "train.py", PATH=path)
    assert done.returncode == 1
    assert "host there: it does not see this host's folder " in done.stderr
    assert "Rank 0 of each lane is on host there" in done.stderr
    assert not (sandbox.folder / "runs").exists()


def test_a_host_that_never_answers(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", path_with_ssh(sandbox, "exec sleep 600"))
    monkeypatch.setattr(session, "_START_SECONDS", 0.2)
    monkeypatch.setattr(session, "_ANSWER_SECONDS", 0.2)
    with ProbeSession("there", Ssh()) as probe:
        with pytest.raises(ProbeError, match=r"there: it did not answer within 0.2 s\. Try `ssh "):
            probe.facts(JobFiles("/"))
        process = probe._process
    assert process.poll() is not None


def test_there_is_no_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match=r"cannot start `ssh` to reach host there.*Install it"):
        ProbeSession("there", Ssh())

"""The same script alone, under torchrun, under a real mpirun, and with variables set by hand."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from farandole.worker.environment import is_loopback
from tests.support import stand_ins

if TYPE_CHECKING:
    from conftest import Sandbox

FACTS = Path(__file__).parents[1] / "launch" / "scripts" / "facts.py"
LATECOMER = Path(__file__).parent / "scripts" / "latecomer.py"


def facts_of(done: subprocess.CompletedProcess[str], ranks: int = 2) -> list[dict[str, Any]]:
    """What each rank printed, in order of rank, after checking that they found each other."""
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in re.findall(r"^facts (.*)$", done.stdout, re.MULTILINE)]
    found.sort(key=lambda facts: facts["rank"])
    assert [facts["rank"] for facts in found] == list(range(ranks))
    for facts in found:
        assert (facts["size"], facts["sum"]) == (ranks, sum(range(ranks)))
        for addresses in facts["listening"]:
            assert all(map(is_loopback, addresses)), addresses
    return found


def joined(ends: list[subprocess.CompletedProcess[str]]) -> subprocess.CompletedProcess[str]:
    """Several ends as one."""
    code = max(abs(end.returncode) for end in ends)
    text = "".join(end.stdout for end in ends)
    return subprocess.CompletedProcess([], code, text, "".join(end.stderr for end in ends))


def open_mpi(rank: int, local_size: int = 2) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % local_size),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
        "PMIX_NAMESPACE": "17",
    }


def test_alone(sandbox: Sandbox) -> None:
    (facts,) = facts_of(sandbox.fork(FACTS, "--epochs", "3"), ranks=1)
    assert facts["arguments"] == ["--epochs", "3"]
    assert facts["name"].startswith("facts-")
    assert facts["listening"] == [[]]  # nobody to talk to
    assert (facts["sync"], facts["seed"]) == ("None", 0)


def test_torchrun(sandbox: Sandbox) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = sandbox.fork(*torchrun, FACTS)
    for facts in facts_of(done):
        assert facts["local"] == [facts["rank"], 2]


@pytest.mark.mpi
def test_mpirun(sandbox: Sandbox, mpirun: list[str]) -> None:
    itself = ["env", "-u", stand_ins.VARIABLE, sys.executable]  # nobody stands in for these ranks
    done = sandbox.run([*mpirun, "-n", "2", *itself, FACTS])
    for facts in facts_of(done):
        assert facts["local"] == [facts["rank"], 2]
        assert facts["listening"][0]
    assert list((sandbox.temporary / f"farandole-{os.getuid()}").iterdir()) == []


@pytest.mark.mpi
def test_mpirun_needs_no_ssh_on_one_host(sandbox: Sandbox, mpirun: list[str]) -> None:
    """Where only what mpirun itself needs is on the PATH."""
    programs = sandbox.folder / "programs"
    programs.mkdir()
    for name in ("mpirun", "orted", "prted", "prterun", "env", "true", "false", "sh"):
        found = shutil.which(name)
        if found is not None:
            (programs / name).symlink_to(found)
    alone = {"PATH": str(programs)}
    done = sandbox.run([*mpirun, "-n", "2", "true"], **alone)
    assert done.returncode == 0, done.stderr
    done = sandbox.farandole(
        "horovodrun", "-np", "2", "--mpi", "--mpi-args=--oversubscribe", "true", **alone
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.mpi
def test_mpirun_names_the_rank_that_never_came(sandbox: Sandbox, mpirun: list[str]) -> None:
    done = sandbox.run([*mpirun, "-n", "2", sys.executable, LATECOMER])
    assert done.returncode != 0
    assert "JoinError: rank 0 waited 2 s for rank(s) [1] of 2 to call fd.init()" in done.stderr
    assert list((sandbox.temporary / f"farandole-{os.getuid()}").iterdir()) == []


def test_our_launcher_names_the_rank_that_never_came(sandbox: Sandbox) -> None:
    done = sandbox.farandole("run", "-n", "2", LATECOMER)
    assert done.returncode == 1
    last = done.stderr[done.stderr.rindex("farandole: rank") :]
    assert last.startswith("farandole: rank 0 failed (exit code 1); the other was stopped")
    assert "JoinError: rank 0 waited 2 s for rank(s) [1] of 2 to call fd.init()" in last


def test_a_rank_set_by_hand(sandbox: Sandbox, two_ranks: list[dict[str, str]]) -> None:
    facts_of(joined(sandbox.by_hand(two_ranks, FACTS)))
    assert list((sandbox.temporary / f"farandole-{os.getuid()}").iterdir()) == []


def test_mpi_on_several_hosts(sandbox: Sandbox, free_port: str) -> None:
    # One rank a host, says Open MPI; that both hosts are this one is not the ranks' business.
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port}
    ends = sandbox.by_hand([open_mpi(rank, 1) | common for rank in (0, 1)], FACTS)
    found = [json.loads(end.stdout.removeprefix("facts ")) for end in ends]
    assert [facts["sum"] for facts in found] == [1.0, 1.0]

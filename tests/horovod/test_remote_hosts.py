"""Workers on other hosts: started by ssh, with the right ranks, ended with the job.

Nothing stays there.

The `ssh` of these tests runs its command on this machine, away from whoever started it, as a real
one does; in the last test in the network of another, emulated host.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from farandole.emulate.cluster import Cluster

if TYPE_CHECKING:
    from conftest import Sandbox

SSH = """#!/bin/sh
echo "$*" >> ssh.log
for command; do :; done
{refuse}
exec {enter} setsid --wait sh -c "$command"
"""
FACTS = """
import json, os, sys
import psutil, torch
import horovod.torch as hvd

if "--torch" in sys.argv:  # before hvd has shown its token: the agent has
    torch.distributed.init_process_group("gloo")
hvd.init()
facts = {name: getattr(hvd, name)() for name in
         ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")}
facts["sum"] = hvd.allreduce(torch.ones(2) * (hvd.rank() + 1), op=hvd.Sum).tolist()
facts["host"] = os.uname().nodename
facts["user"] = os.environ.get("OF_THE_USER")
facts["listening"] = [
    end.laddr.ip for end in psutil.Process().net_connections("inet") if end.status == "LISTEN"
]
sys.stdout.write(f"facts {json.dumps(facts)}\\n")
if "--fail" in sys.argv and hvd.rank() == 2:
    raise ValueError("on the other host")
hvd.allreduce(torch.ones(1))
"""


def fake_ssh(sandbox: Sandbox, enter: str = "", refuse: str = "") -> str:
    """A PATH on which `ssh` is ours."""
    folder = sandbox.folder / "bin"
    folder.mkdir()
    script = folder / "ssh"
    script.write_text(SSH.format(enter=enter, refuse=refuse))
    script.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def facts_of(done: subprocess.CompletedProcess[str]) -> list[dict[str, object]]:
    found = re.findall(r"^\[\d\] facts (.*)$", done.stdout, re.MULTILINE)
    return sorted((json.loads(line) for line in found), key=lambda facts: facts["rank"])


HOSTS = ("horovodrun", "-np", "3", "-H", "localhost:1,there:2", "--network-interface", "lo")


def test_ranks_on_two_hosts_and_a_failure_on_the_other(
    sandbox: Sandbox, warm_variables: dict[str, str]
) -> None:
    path = fake_ssh(sandbox)
    script = sandbox.script("train.py", FACTS)
    done = sandbox.farandole(
        *(*HOSTS, "-p", "2222", "--output-filename", "kept", sys.executable, script, "--fail"),
        **warm_variables,
        PATH=path,
        OF_THE_USER="a 'b' $c\nd",
    )
    assert sandbox.processes() == []
    assert done.returncode == 1
    last = done.stderr[done.stderr.rindex("\nfarandole: rank ") :]
    assert "rank 2 failed (exit code 1); the other 2 were stopped" in last
    assert "ValueError: on the other host" in last
    facts = facts_of(done)
    places = [
        [f[k] for k in ("local_rank", "local_size", "cross_rank", "cross_size")] for f in facts
    ]
    assert places == [[0, 1, 0, 2], [0, 2, 1, 2], [1, 2, 0, 1]]
    for rank, found in enumerate(facts):
        assert (found["rank"], found["sum"]) == (rank, [6.0, 6.0])
        assert found["user"] == "a 'b' $c\nd"
        assert set(found["listening"]) <= {"127.0.0.1"}  # the interface that was named
        assert "facts" in (sandbox.folder / f"kept/rank.{rank}/stdout").read_text()
    said = (sandbox.folder / "ssh.log").read_text()
    assert said.count("-o BatchMode=yes") == said.count("-p 2222 there env ") == 1
    assert "OF_THE_USER" not in said
    assert "FARANDOLE_TOKEN" not in said  # no variable of the user on a command line


def test_a_host_that_cannot_be_reached(sandbox: Sandbox) -> None:
    path = fake_ssh(sandbox, refuse="echo 'there: Permission denied' >&2; exit 255")
    script = sandbox.script("wait.py", "import time; time.sleep(600)")
    done = sandbox.farandole(*HOSTS, sys.executable, script, PATH=path)
    assert sandbox.processes() == []
    assert done.returncode == 1
    assert "host there: it cannot be reached by ssh: there: Permission denied. Try" in done.stderr


WAIT = """
import os, subprocess, time
from pathlib import Path

child = subprocess.Popen(["sleep", "600"])
Path(f"half-{os.environ['RANK']}").write_text(f"{os.getpid()} {child.pid} {os.getppid()}")
Path(f"half-{os.environ['RANK']}").rename(f"ready-{os.environ['RANK']}")
time.sleep(600)
"""


def start_waiting(sandbox: Sandbox) -> tuple[subprocess.Popen[str], list[list[int]]]:
    path = fake_ssh(sandbox)
    script = sandbox.script("wait.py", WAIT)
    job = sandbox.start_farandole(*HOSTS, sys.executable, script, PATH=path)
    ready = [sandbox.folder / f"ready-{rank}" for rank in range(3)]
    sandbox.wait_until(
        lambda: job.poll() is not None or all(path.exists() for path in ready), "all workers run"
    )
    assert job.poll() is None, job.communicate()
    return job, [[int(pid) for pid in path.read_text().split()] for path in ready]


def test_a_launcher_told_to_stop(sandbox: Sandbox) -> None:
    job, _ = start_waiting(sandbox)
    os.killpg(job.pid, signal.SIGINT)
    done = sandbox.finish(job)
    assert sandbox.processes() == []
    assert done.returncode == 130
    assert done.stderr == "farandole: stopped by SIGINT; no worker is left\n"


def test_a_launcher_killed_outright_takes_the_other_hosts_workers_along(sandbox: Sandbox) -> None:
    job, pids = start_waiting(sandbox)
    job.kill()
    job.communicate()
    there = {*pids[1], *pids[2]}  # with their children, and their agent
    sandbox.wait_until(
        lambda: not there & {process.pid for process in sandbox.processes()},
        "all end on the other host",
    )
    os.kill(pids[0][1], signal.SIGKILL)  # here nobody is left who knows of `sleep`
    sandbox.wait_until_gone()


@pytest.mark.usefixtures("root")
def test_another_network(sandbox: Sandbox, warm_variables: dict[str, str]) -> None:
    """The launcher on one emulated host, a worker on each of two; no interface is named.

    The script forms a group of PyTorch's own as well, through the launcher's store.
    """
    script = sandbox.script("train.py", FACTS)
    with Cluster(hosts=2) as cluster:
        namespaces = "--net --uts --ipc --mount"
        enter = f"nsenter --target {cluster._inits[1].pid} {namespaces} env --chdir=$PWD"
        path = fake_ssh(sandbox, enter=enter)
        job = cluster.start(
            0,
            [
                *("env", "-u", "GLOO_SOCKET_IFNAME"),  # each host finds its own way
                *(sys.executable, "-m", "farandole", "horovodrun", "-np", "2"),
                *("-H", "emulated-0:1,emulated-1:1", sys.executable, script, "--torch"),
            ],
            env={**sandbox.environment, **warm_variables, "PATH": path},
            cwd=sandbox.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        done = sandbox.finish(job)
        addresses = cluster.addresses
    assert done.returncode == 0, done.stderr
    facts = facts_of(done)
    assert [found["host"] for found in facts] == ["emulated-0", "emulated-1"]
    for rank, found in enumerate(facts):
        assert (found["rank"], found["sum"]) == (rank, [3.0, 3.0])
        assert (found["local_size"], found["cross_rank"], found["cross_size"]) == (1, rank, 2)
        assert set(found["listening"]) <= {addresses[rank], "127.0.0.1"}

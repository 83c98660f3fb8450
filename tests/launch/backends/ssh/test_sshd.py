"""Jobs over a real OpenSSH server, with keys of its own: odd names, secrets, refusals, kills."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import psutil
import pytest

from farandole.emulate.cluster import Cluster
from farandole.emulate.ssh_access import SshAccess
from farandole.launch.backends.ssh.channel import Ssh
from farandole.launch.job import Job
from farandole.launch.launcher import launch_on_hosts
from farandole.topology import Host, Topology

if TYPE_CHECKING:
    from conftest import Sandbox

pytestmark = pytest.mark.needs("sshd")
ODD = 'it\'s "k\u00f6\u00e7ek"\n$HOME; `exit`'
SECRETS = """
import json, os, psutil, stat, sys, tempfile
from pathlib import Path

token = os.environ["FARANDOLE_TOKEN"].encode()
shown = []
for process in Path("/proc").glob("[0-9]*"):
    try:
        if token in (process / "cmdline").read_bytes():
            shown.append(str(process))
    except OSError:
        pass
for path in Path(tempfile.gettempdir()).rglob("*"):
    if path.is_file() and token in path.read_bytes():
        private = not path.stat().st_mode & 0o077 or not path.parent.stat().st_mode & 0o077
        if not private:
            shown.append(str(path))
_, port, place = os.environ["FARANDOLE_STORE"].split(":")
listening = [
    end.laddr.ip for end in psutil.net_connections("tcp")
    if end.status == "LISTEN" and end.laddr.port == int(port)
]
print(json.dumps({"shown": shown, "listening": listening, "place": place, "argv": sys.argv,
                  "folder": os.getcwd(), "odd": os.environ["OF_THE_USER"],
                  "rank": os.environ["RANK"], "address": os.environ["SSH_CONNECTION"].split()[2]}))
"""
WAIT = """
import os, subprocess, time
from pathlib import Path

child = subprocess.Popen(["sleep", "600"], start_new_session=True)
name = os.environ["RANK"]
Path(f"half-{name}").write_text(f"{os.getpid()} {child.pid} {os.getppid()}")
Path(f"half-{name}").rename(f"ready-{name}")
time.sleep(600)
"""


@pytest.fixture
def access(sandbox: Sandbox) -> SshAccess:
    return SshAccess(sandbox.temporary / "ssh")


@pytest.fixture
def there(sandbox: Sandbox, access: SshAccess, free_port: str) -> Iterator[str]:
    """The name of a host whose server answers."""
    variables = {name: sandbox.environment[name] for name in ("FARANDOLE_TEST", "TMPDIR")}
    words = access.server("there", "127.0.0.1", int(free_port), variables)
    with (sandbox.temporary / "sshd.log").open("w") as log:
        server = sandbox.start(words, stdout=log, stderr=log)
    try:
        sandbox.wait_until(lambda: answers(int(free_port)), "the server answers")
        yield "there"
    finally:
        server.kill()
        server.wait(100)


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def path_of(access: SshAccess) -> str:
    return f"{access.path_folder}:{os.environ['PATH']}"


def test_odd_names_arrive_and_secrets_are_not_shown(
    sandbox: Sandbox, access: SshAccess, there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = sandbox.folder / ODD
    folder.mkdir()
    script = folder / f"{ODD.replace('/', '')}.py"
    script.write_text(SECRETS)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("tempfile.tempdir", str(sandbox.temporary))
    monkeypatch.setenv("PATH", path_of(access))
    monkeypatch.setenv("OF_THE_USER", ODD)
    topology = Topology((Host(there, (0, 1)),))
    output = sandbox.folder / "kept"
    job = Job(2, [script.name, ODD, "", "-x"], output=output)
    assert launch_on_hosts(job, topology, Ssh(), ["lo"]).exit_code == 0
    for rank in range(2):
        found = json.loads((output / f"rank.{rank}/stdout").read_text())
        assert found["shown"] == []
        assert found["listening"] == [found["place"]] == ["127.0.0.1"]  # of `lo`, and no other
        assert found["argv"] == [script.name, ODD, "", "-x"]
        assert (found["folder"], found["odd"]) == (str(folder), ODD)
        assert found["rank"] == str(rank)
    assert [process for process in sandbox.processes() if "sshd" not in process.name()] == []


def refuse(access: SshAccess, how: str) -> None:
    if how == "unknown":
        (access.folder / "known_hosts").write_text("")
    elif how == "wrong key":
        known = (access.folder / "known_hosts").read_text().partition(" ")[0]
        access.make_key("another")
        key = (access.folder / "another.pub").read_text()
        (access.folder / "known_hosts").write_text(f"{known} {key}")
    elif how == "password":
        (access.folder / "user_key").unlink()
    else:
        client = access.folder / "client"
        client.write_text(client.read_text().replace("HostName 127.0.0.1", "HostName 127.0.0.77"))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("unknown", "Host key verification failed."),
        ("wrong key", "REMOTE HOST IDENTIFICATION HAS CHANGED"),
        ("password", "Permission denied (publickey"),
        ("nobody", "Connection refused"),
    ],
)
def test_a_host_that_ssh_cannot_enter(
    sandbox: Sandbox, access: SshAccess, there: str, how: str, said: str
) -> None:
    refuse(access, how)
    script = sandbox.script("train.py", "")
    done = sandbox.farandole(
        *("horovodrun", "-np", "1", "-H", f"{there}:1", "--network-interface", "lo"),
        *(sys.executable, script),
        PATH=path_of(access),
    )
    assert done.returncode == 1
    assert said in done.stderr
    assert f"host {there}: it cannot be reached by ssh: " in done.stderr
    assert f"Try `ssh -o BatchMode=yes {there} true`" in done.stderr


@pytest.mark.parametrize("killed", ["launcher", "ssh", "agent", "sshd"])
def test_whoever_is_killed_nothing_is_left_there(
    sandbox: Sandbox, access: SshAccess, there: str, killed: str
) -> None:
    script = sandbox.script("wait.py", WAIT)
    job = sandbox.start_farandole(
        *("horovodrun", "-np", "2", "-H", f"{there}:2", "--network-interface", "lo"),
        *(sys.executable, script),
        PATH=path_of(access),
        FARANDOLE_FORK="0",
    )
    ready = [sandbox.folder / f"ready-{rank}" for rank in range(2)]
    sandbox.wait_until(
        lambda: job.poll() is not None or all(path.exists() for path in ready), "all workers run"
    )
    assert job.poll() is None, job.communicate()
    pids = [[int(pid) for pid in path.read_text().split()] for path in ready]
    agent = pids[0][2]
    assert agent == pids[1][2], "one agent for both"
    ssh = next(child for child in psutil.Process(job.pid).children() if child.name() == "ssh")
    victim = {"launcher": job.pid, "ssh": ssh.pid, "agent": agent}
    victim["sshd"] = psutil.Process(agent).ppid() if killed == "sshd" else 0
    os.kill(victim[killed], signal.SIGKILL)
    there_now = {pid for worker in pids for pid in worker}
    sandbox.wait_until(
        lambda: not there_now & {process.pid for process in sandbox.processes()},
        "all end on the other host",
    )
    done = sandbox.finish(job)
    if killed == "launcher":
        assert done.returncode == -signal.SIGKILL
    else:
        assert done.returncode == 255
        assert f"host {there} was lost" in done.stderr


@pytest.mark.usefixtures("root")
def test_two_emulated_hosts_and_a_third_by_way_of_the_second(
    sandbox: Sandbox, access: SshAccess
) -> None:
    """The user's settings lead to the third through the second (ProxyJump). The launcher is on the
    first, and its store listens there on the one address that the hosts share."""
    script = sandbox.script("train.py", SECRETS)
    variables = {name: sandbox.environment[name] for name in ("FARANDOLE_TEST", "TMPDIR")}
    with Cluster(hosts=3) as cluster:
        for host in (1, 2):
            access.start_server(cluster, host, variables)
        client = access.folder / "client"
        jump = f"Host {cluster.names[2]}\n  ProxyCommand ssh -W %h:%p {cluster.names[1]}\n"
        client.write_text(jump + client.read_text())
        job = cluster.start(
            0,
            [
                *(sys.executable, "-m", "farandole", "horovodrun", "-np", "2"),
                *("-H", f"{cluster.names[1]}:1,{cluster.names[2]}:1", sys.executable, script),
            ],
            env={**sandbox.environment, "PATH": path_of(access), "OF_THE_USER": ODD},
            cwd=sandbox.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        done = sandbox.finish(job)
        addresses = cluster.addresses
    assert done.returncode == 0, done.stderr
    lines = [line.partition("] ")[2] for line in done.stdout.splitlines()]
    facts = sorted((json.loads(line) for line in lines), key=lambda found: found["rank"])
    assert [found["address"] for found in facts] == addresses[1:]
    for found in facts:
        assert found["shown"] == []
        assert found["place"] == addresses[0]

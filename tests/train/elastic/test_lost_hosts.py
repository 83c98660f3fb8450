"""An elastic job on three emulated hosts with real OpenSSH servers: workers are killed, hosts are
cut off, come back, are added and removed. The weights are those of one process that takes the same
steps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from farandole.emulate.cluster import Cluster
from farandole.emulate.ssh_access import SshAccess
from tests.support.elastic_replay import require_exact

if TYPE_CHECKING:
    from conftest import Sandbox

pytestmark = [pytest.mark.needs("sshd"), pytest.mark.usefixtures("root")]

SCRIPT = Path(__file__).parent / "scripts" / "hosts.py"
PIPELINE = Path(__file__).parents[2] / "launch" / "scripts" / "restarted.py"
UNSET = ("-u", "GLOO_SOCKET_IFNAME", "-u", "MASTER_ADDR", "-u", "MASTER_PORT")


class ElasticJob:
    """`farandole run` on the first host, and what its workers write down."""

    def __init__(
        self,
        cluster: Cluster,
        access: SshAccess,
        sandbox: Sandbox,
        variables: Mapping[str, str],
        *words: str,
        script: Sequence[str | Path] = (SCRIPT,),
    ) -> None:
        self.cluster, self.sandbox, self.folder = cluster, sandbox, sandbox.folder
        self.output = (self.folder / "output").open("w")
        command = ["run", *words, *script]
        self.process = cluster.start(
            0,
            ["env", *UNSET, sys.executable, "-m", "farandole", *command],
            env={
                **sandbox.environment,
                **variables,
                "PATH": f"{access.path_folder}:{os.environ['PATH']}",
            },
            cwd=self.folder,
            stdout=self.output,
            stderr=subprocess.STDOUT,
        )

    def said(self) -> str:
        return (self.folder / "output").read_text()

    def wait_for(self, text: str, times: int = 1) -> None:
        self.sandbox.wait_until(
            lambda: self.process.poll() is not None or self.said().count(text) >= times,
            f"{text!r} is said",
        )
        assert self.said().count(text) >= times, self.said()

    def processes(self, host: int) -> list[int]:
        words = ["ip", "netns", "pids", self.cluster.namespace(host)]
        found = subprocess.run(words, check=True, capture_output=True, text=True).stdout
        return [int(number) for number in found.split()]

    def wait_until_nothing_runs(self, host: int) -> None:
        """No agent, and no worker."""
        self.sandbox.wait_until(
            lambda: not any(map(is_python, self.processes(host))),
            f"no process of the job runs on host {host}",
        )

    def kill_agent(self, host: int) -> None:
        (agent,) = (number for number in self.processes(host) if is_agent(number))
        os.kill(agent, signal.SIGKILL)

    def wait_for_steps(self, worker: int, more: int = 3) -> None:
        """Until the worker has read some batches more."""
        used = self.folder / f"used-{worker}"
        before = len(used.read_text().splitlines()) if used.exists() else 0
        self.sandbox.wait_until(
            lambda: (
                self.process.poll() is not None
                or (used.exists() and len(used.read_text().splitlines()) >= before + more)
            ),
            f"worker {worker} trains",
        )
        assert self.process.poll() is None, self.said()

    def wait_for_checkpoint(self) -> None:
        """Until there is one more."""
        folder = self.folder / "runs" / "job" / "checkpoints"
        before = {path.name for path in folder.glob("[0-9]*")}
        self.sandbox.wait_until(
            lambda: (
                self.process.poll() is not None
                or bool({path.name for path in folder.glob("[0-9]*")} - before)
            ),
            "a checkpoint is saved",
        )
        assert self.process.poll() is None, self.said()

    def place(self, worker: int) -> tuple[str, int]:
        host, process = (self.folder / f"place-{worker}").read_text().split()
        return host, int(process)

    def say_hosts(self, *lines: str) -> None:
        (self.folder / "hosts").write_text("\n".join(lines))

    def set_link(self, host: int, state: str) -> None:
        """Its packets are dropped, or not. No connection is closed by it."""
        switch = self.cluster.namespace("switch")
        words = ["ip", "-n", switch, "link", "set", f"port{host}", state]
        subprocess.run(words, check=True)

    def finish(self) -> str:
        (self.folder / "finish").touch()
        try:
            assert self.process.wait(150) == 0, self.said()
        finally:
            self.output.close()
        return self.said()


def is_python(number: int) -> bool:
    try:
        return psutil.Process(number).name().startswith("python")
    except psutil.NoSuchProcess:
        return False


def is_agent(number: int) -> bool:
    try:
        return "farandole.launch.backends.remote.agent" in psutil.Process(number).cmdline()
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, SshAccess]]:
    access = SshAccess(tmp_path_factory.mktemp("ssh"))
    with Cluster(hosts=3) as cluster:
        for host in (1, 2):
            access.start_server(cluster, host)
        yield cluster, access


def test_hosts_come_and_go(
    hosts: tuple[Cluster, SshAccess], sandbox: Sandbox, warm_variables: dict[str, str]
) -> None:
    (sandbox.folder / "hosts").write_text("emulated-1\nemulated-0\n")
    words = ["--hostfile", "hosts", "--min", "1", "--max", "3", "--restarts", "9"]
    words += ["--host-silence", "12", "--name", "job", "--checkpoint", "every=10steps,keep=2"]
    job = ElasticJob(*hosts, sandbox, warm_variables, *words)
    job.wait_for("rank 0 is on host emulated-1")
    job.wait_for_checkpoint()
    assert [job.place(worker)[0] for worker in (0, 1)] == ["emulated-1", "emulated-0"]

    # The network of the other host fails, which has rank 0: connections become silent. Both ends
    # notice. The successor saves into the folder that the cut-off worker had locked.
    job.set_link(1, "down")
    job.wait_for("emulated-1 is left out until it answers again")
    job.wait_for("rank 0 is on host localhost: what the run logs and saves from here on is there")
    job.wait_until_nothing_runs(1)
    job.wait_for_checkpoint()
    job.set_link(1, "up")
    job.wait_for_steps(2)
    assert job.place(2)[0] == "emulated-1"

    # The agent is killed, and with it its workers.
    job.kill_agent(1)
    job.wait_for_steps(3)
    assert job.place(3)[0] == "emulated-1"

    # A host is added; one that cannot take part is named, and so is a file that is wrong.
    job.say_hosts("emulated-1", "emulated-0", "emulated-2", "nowhere")
    job.wait_for_steps(4)
    assert job.place(4)[0] == "emulated-2"
    job.wait_for("host nowhere: it cannot be reached by ssh")
    job.say_hosts("emulated-1", "???")
    job.wait_for("hosts, line 2: '???' is no host")

    # The launcher's own host is removed, and with it rank 0. A worker is killed.
    job.say_hosts("emulated-1", "emulated-2")
    job.wait_for("rank 0 is on host emulated-1", times=2)
    job.wait_for_steps(3)
    os.kill(job.place(4)[1], signal.SIGKILL)
    job.wait_for_steps(5)
    assert job.place(5)[0] == "emulated-2"
    job.wait_for_checkpoint()
    said = job.finish()
    assert sandbox.processes() == []
    for host in range(3):
        job.wait_until_nothing_runs(host)
    require_exact(sandbox.folder, {"3", "5"})
    assert said.count("The job goes on with the hosts that it knows.") == 1
    assert "another takes its place (3 of 9 restarts)" in said  # added hosts take none


def stop_server(access: SshAccess, name: str) -> None:
    """From now on it takes no new connection; those that it has stay."""
    settings = str(access.folder / f"server-{name}")
    for process in psutil.process_iter(["cmdline"]):
        if settings in (process.info["cmdline"] or ()):
            process.kill()


def test_a_layout_goes_on_with_the_replicas_of_the_hosts_that_are_left(
    hosts: tuple[Cluster, SshAccess], sandbox: Sandbox, warm_variables: dict[str, str]
) -> None:
    """A replica of two stages on each of two hosts, one of which goes for good. No step is lost."""
    words = ["-H", "emulated-0:2,emulated-2:2", "--layout", "stages=2,microbatches=2,balance=2+2"]
    words += ["--min", "2", "--restarts", "3", "--name", "job", "--checkpoint", "every=1000steps"]
    script = [PIPELINE, "3:9:hang:0"]
    job = ElasticJob(*hosts, sandbox, warm_variables, *words, script=script)
    hangs = sandbox.folder / "hangs"
    sandbox.wait_until(
        lambda: job.process.poll() is not None or (hangs.exists() and hangs.read_text() != ""),
        "rank 3 is in its ninth step",
    )
    assert hangs.exists(), job.said()
    stop_server(hosts[1], "emulated-2")
    os.kill(int(hangs.read_text()), signal.SIGKILL)
    said = job.finish()
    assert "host emulated-2: it cannot be reached by ssh" in said
    assert "2 workers start without emulated-2" in said
    made = [line.split() for line in (sandbox.folder / "steps-job").read_text().splitlines()]
    steps = [int(step) for rank, attempt, step in made if (rank, attempt) == ("0", "1")]
    # Of the second epoch's 48 samples, 16 were used before. The rest are 8 steps of one replica.
    assert steps == list(range(9, 9 + 8 + 12))

"""A real Slurm of two nodes, both on this machine: munged, slurmctld and two slurmd on loopback.

Everything is in one temporary folder, with ports of its own. Jobs of it get the environment of
whoever submits them, and so the mark of the test's sandbox.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.support.ports import find_free_port

NODES = ("one", "two")
_PATIENCE_SECONDS = 200.0
_CONFIGURATION = """\
ClusterName=farandole
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# The last is also how long a job that was queued again waits before it starts.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,batch_sched_delay=1
KillWait=200
JobRequeue=1
NodeName=one NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName=two NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


class SlurmCluster:
    """`configuration` is what the variable SLURM_CONF must name for Slurm's commands."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.configuration = folder / "slurm.conf"

    def start(self) -> None:
        folder = self._folder
        key = folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(1024))
        (folder / "state").mkdir()
        self.configuration.write_text(
            _CONFIGURATION.format(
                host=platform.node().partition(".")[0],
                ports=_free_ports(3),
                user=getpass.getuser(),
                folder=folder,
            )
        )
        _run(
            *("munged", "--force", f"--socket={folder}/munge.socket", f"--key-file={key}"),
            *(f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed")),
        )
        _run("slurmctld", "-f", str(self.configuration))
        for node in NODES:
            _run("slurmd", "-f", str(self.configuration), "-N", node)
        self._wait_until_idle()

    def _wait_until_idle(self) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while (said := self.ask("sinfo", "--noheader", "--format=%T")) != "idle":
            assert time.monotonic() < deadline, f"Slurm's nodes are not idle: {said}"
            time.sleep(0.1)

    def ask(self, *words: str) -> str:
        """What one of Slurm's commands prints."""
        done = subprocess.run(
            words,
            env={**os.environ, "SLURM_CONF": str(self.configuration)},
            capture_output=True,
            text=True,
            timeout=_PATIENCE_SECONDS,
        )
        return (done.stdout + done.stderr).strip()

    def stop(self) -> None:
        """Ends jobs and daemons."""
        daemons = [process for process in psutil.process_iter() if self._is_ours(process)]
        children = [child for daemon in daemons for child in _children(daemon)]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in (*daemons, *children):
                with contextlib.suppress(psutil.Error):
                    process.send_signal(number)
            _, left = psutil.wait_procs([*daemons, *children], timeout=10)
            if not left:
                return

    def _is_ours(self, process: psutil.Process) -> bool:
        """munged, slurmctld, slurmd and slurmstepd name the folder in their words or log files."""
        try:
            if process.name() not in ("munged", "slurmctld", "slurmd", "slurmstepd"):
                return False
            text = " ".join(process.cmdline()) + process.environ().get("SLURM_CONF", "")
            return str(self._folder) in text
        except psutil.Error:
            return False


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.Error:
        return []


def _run(program: str, *options: str) -> None:
    found = shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin")
    assert found is not None
    done = subprocess.run([found, *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def _free_ports(count: int) -> list[int]:
    found: set[int] = set()
    while len(found) < count:
        found.add(find_free_port())
    return list(found)


@contextlib.contextmanager
def running_slurm() -> Iterator[SlurmCluster]:
    # A short path: munge's socket is in it.
    folder = Path(tempfile.mkdtemp(prefix="fd-slurm-"))
    cluster = SlurmCluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)

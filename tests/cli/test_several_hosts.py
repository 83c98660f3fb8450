"""`farandole run`, `race`, `tune` and `doctor` on two emulated hosts, by real OpenSSH servers.

The command runs on the first host. The hosts share files, and nothing else.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from farandole.emulate.cluster import Cluster
from farandole.emulate.ssh_access import SshAccess
from farandole.worker.marker_files import INTERRUPTED

if TYPE_CHECKING:
    from conftest import Sandbox

pytestmark = [pytest.mark.needs("sshd"), pytest.mark.usefixtures("root")]

RESTARTED = Path(__file__).parents[1] / "launch" / "scripts" / "restarted.py"
HOSTS = "emulated-0:1,emulated-1:1"
UNSET = ("-u", "GLOO_SOCKET_IFNAME", "-u", "MASTER_ADDR", "-u", "MASTER_PORT")
COMMAND = ("env", *UNSET, sys.executable, "-m", "farandole")
TRAIN = """
import os, sys
import torch
import torch.nn.functional as F
import farandole as fd

run = fd.init()
sys.stdout.write(f"rank {run.rank} of {run.size} on {os.uname().nodename}\\n")
model = torch.nn.Linear(4, 2)
model, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randint(0, 2, (16,)))
for x, y in run.loader(data, batch_size=4):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
run.log(loss=loss.item())
if "fail" in sys.argv and run.rank == 1:
    raise ValueError("on the other host")
"""


class TwoHosts:
    """Runs commands on the first host, in a sandbox."""

    def __init__(
        self, cluster: Cluster, access: SshAccess, sandbox: Sandbox, variables: Mapping[str, str]
    ) -> None:
        self.cluster, self.access, self.sandbox = cluster, access, sandbox
        self._variables = variables

    def start(self, *words: str | Path) -> subprocess.Popen[str]:
        cache = self.sandbox.folder / "cache"  # so that the link is measured here, and now
        return self.cluster.start(
            0,
            # Each host finds its own way to the other.
            [*COMMAND, *words],
            env={
                **self.sandbox.environment,
                **self._variables,
                "PATH": f"{self.access.path_folder}:{os.environ['PATH']}",
                "XDG_CACHE_HOME": str(cache),
            },
            cwd=self.sandbox.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def farandole(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        return self.sandbox.finish(self.start(*words))


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, SshAccess]]:
    access = SshAccess(tmp_path_factory.mktemp("ssh"))
    with Cluster(hosts=2, rate="200mbit") as cluster:
        access.start_server(cluster, 1)
        yield cluster, access


@pytest.fixture
def two_hosts(
    hosts: tuple[Cluster, SshAccess], sandbox: Sandbox, warm_variables: dict[str, str]
) -> TwoHosts:
    sandbox.script("train.py", TRAIN)
    return TwoHosts(*hosts, sandbox, warm_variables)


def test_run_and_a_failure_on_the_other_host(two_hosts: TwoHosts) -> None:
    done = two_hosts.farandole("run", "-H", HOSTS, "--name", "job", "train.py", "fail")
    assert two_hosts.sandbox.processes() == []
    assert done.returncode == 1
    assert "[0] rank 0 of 2 on emulated-0\n" in done.stdout
    assert "[1] rank 1 of 2 on emulated-1\n" in done.stdout
    last = done.stderr[done.stderr.rindex("\nfarandole: rank ") :]
    assert "farandole: rank 1 on emulated-1 failed (exit code 1); the other was stopped" in last
    assert "ValueError: on the other host" in last
    start = json.loads(
        (two_hosts.sandbox.folder / "runs/job/metrics.jsonl").read_text().split("\n")[0]
    )
    assert start["hosts"] == 2


def test_all_start_again_when_rank_0_is_killed_on_the_other_host(two_hosts: TwoHosts) -> None:
    words = ["--sync", "local:every=5", "--restarts", "1", "--checkpoint", "every=4steps"]
    hosts = "emulated-1:1,emulated-0:1"
    done = two_hosts.farandole("run", *words, "-H", hosts, RESTARTED, "0:11:kill:0")
    assert two_hosts.sandbox.processes() == []
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 0 on emulated-1 was killed by SIGKILL" in done.stderr
    (folder,) = (two_hosts.sandbox.folder / "runs").iterdir()
    assert f"(1 of 1 restarts), from runs/{folder.name}/checkpoints/00000" in done.stderr
    assert f"[0] going on from runs/{folder.name}/checkpoints/00000" in done.stdout


def test_race_over_both_hosts(two_hosts: TwoHosts) -> None:
    """Rank 0 is on the other host. Both share files here, so the race can read what it writes."""
    hosts = "emulated-1:1,emulated-0:1"
    done = two_hosts.farandole("race", "-H", hosts, "--sync", "allreduce", "train.py")
    assert two_hosts.sandbox.processes() == []
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (two_hosts.sandbox.folder / "runs").iterdir()
    found = json.loads((folder / "summary.json").read_text())
    assert found["facts"]["hosts"] == "emulated-1: 0, localhost: 1"
    (lane,) = found["lanes"]
    assert (lane["workers"], lane["outcome"]) == (2, "ok")
    assert f"-H {hosts} " in lane["command"]
    assert lane["startup_seconds"] is None  # rank 0 cannot read this host's clock
    assert 0 < lane["link"]["bytes_per_second"] < 30e6  # 200 Mbit/s
    caption = " ".join(done.stdout.split())
    assert "link between hosts: " in caption
    assert "MB/s" in caption
    assert "The link between hosts: " in (folder / "report.html").read_text()


@pytest.mark.needs("optuna")
def test_trials_of_a_study_are_spread_over_both_hosts(two_hosts: TwoHosts) -> None:
    words = ("--metric", "loss", "--trials", "2", "--storage", "found/study.journal")
    done = two_hosts.farandole("tune", "-H", HOSTS, *words, "train.py")
    assert two_hosts.sandbox.processes() == []
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 trials at a time, on 1 worker each: localhost:1; emulated-1:1" in done.stdout
    for trial in range(2):
        output = (two_hosts.sandbox.folder / f"found/trial-{trial}/output.log").read_text()
        assert f"rank 0 of 1 on emulated-{trial}\n" in output


def test_bench_comm_over_both_hosts(two_hosts: TwoHosts) -> None:
    plan = ("--sizes", "4KiB", "--repeats", "2", "--json", "comm.json")
    done = two_hosts.farandole("bench", "comm", "-H", HOSTS, *plan)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks on 2 hosts" in done.stdout
    found = json.loads((two_hosts.sandbox.folder / "comm.json").read_text())
    assert [row["hosts"] for row in found["rows"]] == [2]


def test_a_key_that_is_not_accepted(two_hosts: TwoHosts) -> None:
    access = two_hosts.access
    access.make_key("stranger")
    known = (access.folder / "user_key").rename(access.folder / "hidden")
    try:
        identity = ("--ssh-identity-file", access.folder / "stranger")
        done = two_hosts.farandole("run", "-H", HOSTS, *identity, "train.py")
    finally:
        known.rename(access.folder / "user_key")
    assert two_hosts.sandbox.processes() == []
    assert done.returncode == 1
    assert done.stdout == ""
    assert "host emulated-1: it cannot be reached by ssh: " in done.stderr
    assert "Permission denied (publickey). Try `ssh -o BatchMode=yes -i " in done.stderr


def test_hosts_that_do_not_answer(two_hosts: TwoHosts) -> None:
    there = two_hosts.cluster.network[77]  # an address that no host has
    done = two_hosts.farandole("run", "-H", f"emulated-0:1,{there}:1,nowhere:1", "train.py")
    assert done.returncode == 1
    assert f"host {there}: it cannot be reached by ssh: " in done.stderr
    assert "host nowhere: it cannot be reached by ssh: " in done.stderr


def test_doctor(two_hosts: TwoHosts) -> None:
    done = two_hosts.farandole("doctor", "-H", HOSTS, "--script", "train.py", "--json")
    assert done.returncode == 0, done.stdout
    found = json.loads(done.stdout)
    assert found["ok"] is True
    assert [host["host"] for host in found["hosts"]] == ["localhost", "emulated-1"]
    first, second = (host["facts"] for host in found["hosts"])
    assert first == second  # they share this machine's files
    assert first["script"] is not None
    assert [(link["from"], link["to"]) for link in found["links"]] == [
        ("localhost", "emulated-1"),
        ("emulated-1", "localhost"),
    ]
    # 200 Mbit/s are 25 MB/s, of which headers take some. A busy machine may be slower.
    assert all(0 < link["bytes_per_second"] < 30e6 for link in found["links"])


def test_doctor_shows_what_is_wrong_and_where(two_hosts: TwoHosts) -> None:
    done = two_hosts.farandole("doctor", "-H", f"{HOSTS},nowhere:1")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert any("from ↓  to →" in line and line.split()[-1] == "nowhere" for line in lines)
    assert any(
        line.startswith("error: host nowhere: it cannot be reached by ssh") for line in lines
    )
    assert lines[-1] == "1 of 3 hosts cannot take part yet: nowhere."


WAIT = """
import os, time
from pathlib import Path
from farandole.worker.marker_files import record_attempts

if os.environ["RANK"] == "0":
    record_attempts(Path.cwd())  # as a run with automatic checkpoints does
open(f"ready-{os.environ['RANK']}", "w").close()
time.sleep(600)
"""


def test_nothing_is_left_of_a_job_whose_launcher_is_stopped(two_hosts: TwoHosts) -> None:
    """Rank 0 is on the other host. Its run does not count Ctrl-C as a failure."""
    sandbox = two_hosts.sandbox
    sandbox.script("wait.py", WAIT)
    job = two_hosts.start("run", "-H", "emulated-1:1,emulated-0:1", "wait.py")
    ready = [sandbox.folder / f"ready-{rank}" for rank in range(2)]
    sandbox.wait_until(
        lambda: job.poll() is not None or all(path.exists() for path in ready), "all workers run"
    )
    assert job.poll() is None, job.communicate()
    os.kill(job.pid, signal.SIGINT)
    done = sandbox.finish(job)
    assert sandbox.processes() == []
    assert done.returncode == 130
    assert (sandbox.folder / INTERRUPTED).exists()

"""Elastic jobs of real processes: killed, added, taken away, stopped. Decisions: test_troupe.py."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from farandole.errors import LaunchError, UserError
from farandole.launch.launcher import launch_elastic
from farandole.launch.policies.elastic.job import ElasticJob

if TYPE_CHECKING:
    from conftest import Sandbox

WORKER = Path(__file__).parent / "scripts" / "elastic_worker.py"
LAUNCHER = """
import sys
import tempfile
from pathlib import Path
from farandole.launch.launcher import launch_elastic
from farandole.launch.policies.elastic.job import ElasticJob

def discover():
    pairs = (line.split(":") for line in Path("hosts").read_text().split())
    return {host: int(slots) for host, slots in pairs}

outcome = launch_elastic(ElasticJob([sys.argv[1]], 1, 3, discover))
print("failure:", outcome.failure, "stopped by:", outcome.stopped_by)
sys.exit(outcome.exit_code)
"""


class Run:
    """The launcher, in a process of its own, and what its workers write down."""

    def __init__(self, sandbox: Sandbox, *hosts: str) -> None:
        self.sandbox = sandbox
        self.say_hosts(*hosts)
        launcher = sandbox.script("launcher.py", LAUNCHER)
        self.process = sandbox.start([sys.executable, launcher, WORKER])

    def say_hosts(self, *hosts: str) -> None:
        half = self.sandbox.folder / "hosts.half"
        half.write_text("\n".join(hosts))
        half.rename(self.sandbox.folder / "hosts")

    def assignments(self, generation: int, size: int) -> list[list[int]]:
        """For each rank its rank, size, local rank, local size, worker and process."""
        files = [self.sandbox.folder / f"assignment-{generation}-{rank}" for rank in range(size)]
        self.sandbox.wait_until(
            lambda: self.process.poll() is not None or all(file.exists() for file in files),
            f"{size} workers have ranks in generation {generation}",
        )
        assert self.process.poll() is None, self.process.communicate()
        return [[int(word) for word in file.read_text().split()] for file in files]


def test_the_life_of_a_job(sandbox: Sandbox) -> None:
    run = Run(sandbox, "localhost:2")
    first = run.assignments(0, 2)
    assert [assignment[:5] for assignment in first] == [[0, 2, 0, 2, 0], [1, 2, 1, 2, 1]]

    os.kill(first[0][-1], signal.SIGKILL)
    (sandbox.folder / "again-0").touch()
    second = run.assignments(1, 2)
    assert [assignment[:5] for assignment in second] == [[0, 2, 0, 2, 1], [1, 2, 1, 2, 2]]
    assert second[0][-1] == first[1][-1]  # the same process

    run.say_hosts("localhost:2", "127.0.0.1:1")
    third = run.assignments(2, 3)
    assert [assignment[:5] for assignment in third] == [
        [0, 3, 0, 2, 1],
        [1, 3, 1, 2, 2],
        [2, 3, 0, 1, 3],
    ]

    run.say_hosts("127.0.0.1:1")
    assert [assignment[:5] for assignment in run.assignments(3, 1)] == [[0, 1, 0, 1, 3]]

    (sandbox.folder / "finish").touch()
    done = sandbox.finish(run.process)
    assert done.returncode == 0, done.stderr
    assert sandbox.processes() == []
    *said, last = done.stdout.splitlines()
    assert last == "failure: None stopped by: None"
    assert sorted(said) == [
        "[0] has rank 0 of 2",
        "[1] has rank 0 of 2",
        "[1] has rank 0 of 3",
        "[1] has rank 1 of 2",
        "[2] has rank 1 of 2",
        "[2] has rank 1 of 3",
        "[3] has rank 0 of 1",
        "[3] has rank 2 of 3",
    ]
    assert done.stderr.splitlines() == [
        "farandole: worker 0 on localhost (rank 0) was killed by SIGKILL; another takes its place",
        "farandole: generation 1: 2 workers on localhost:2; rank 0 is worker 1",
        "farandole: the hosts are now localhost:2, 127.0.0.1:1; they were localhost:2",
        "farandole: generation 2: 3 workers on localhost:2, 127.0.0.1:1; rank 0 is worker 1",
        "farandole: the hosts are now 127.0.0.1:1; they were localhost:2, 127.0.0.1:1",
        "farandole: generation 3: 1 worker on 127.0.0.1:1; rank 0 is worker 3",
    ]
    assert list(sandbox.temporary.glob("farandole-*")) == []


def test_a_stopped_worker_is_replaced(sandbox: Sandbox) -> None:
    """Ctrl-C then finds another that is stopped, and does not wait for it either."""
    run = Run(sandbox, "localhost:2")
    first = run.assignments(0, 2)
    os.kill(first[1][-1], signal.SIGSTOP)
    (sandbox.folder / "again-0").touch()  # rank 0's collective breaks
    second = run.assignments(1, 2)
    assert [assignment[:5] for assignment in second] == [[0, 2, 0, 2, 0], [1, 2, 1, 2, 2]]
    os.kill(second[1][-1], signal.SIGSTOP)
    begin = time.monotonic()
    os.killpg(run.process.pid, signal.SIGINT)
    done = sandbox.finish(run.process)
    assert time.monotonic() - begin < 25, "no grace for a process that cannot hear of it"
    assert done.returncode == 130
    assert sandbox.processes() == []
    assert (
        "farandole: worker 1 on localhost (rank 1) was stopped (SIGSTOP), and did not ask for its "
        "new rank, and was ended; another takes its place"
    ) in done.stderr.splitlines()


def test_ctrl_c_leaves_nothing(sandbox: Sandbox) -> None:
    run = Run(sandbox, "localhost:1")
    run.assignments(0, 1)
    os.killpg(run.process.pid, signal.SIGINT)
    done = sandbox.finish(run.process)
    assert done.returncode == 130
    assert sandbox.processes() == []
    assert done.stdout.splitlines()[-1] == "failure: None stopped by: SIGINT"
    assert list(sandbox.temporary.glob("farandole-*")) == []


def test_too_few_hosts_from_the_beginning() -> None:
    job = ElasticJob(["-c", "1"], 2, 4, lambda: {"localhost": 1}, start_timeout_seconds=0.2)
    with pytest.raises(
        LaunchError, match=r"2 workers are needed, .* slots for 1 \(hosts: localhost:1\)"
    ):
        launch_elastic(job)


def test_a_script_that_fails_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # the logs stay
    script = "raise ValueError('no good')"
    outcome = launch_elastic(ElasticJob(["-S", "-c", script], 2, None, lambda: {"localhost": 2}))
    assert outcome.exit_code == 1
    assert outcome.failure is not None
    assert outcome.failure.error.endswith("ValueError: no good")
    assert outcome.logs is not None
    assert "ValueError: no good" in (outcome.logs / "rank-0.err").read_text()
    assert "localhost is left out: 3 times that" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_workers": 0}, "min_workers=0: a job needs 1 worker or more"),
        ({"max_workers": 1}, "max_workers=1 is less than min_workers=2"),
        ({"workers": 1}, "workers=1 is not between min_workers=2 and max_workers=4"),
        ({"workers": 5}, "workers=5 is not between"),
        ({"reset_limit": -1}, "reset_limit=-1"),
        ({"start_timeout_seconds": 0}, "start_timeout_seconds=0 is no time"),
        ({"answer_seconds": 0}, "answer_seconds=0 is no time"),
    ],
)
def test_what_cannot_be(options: dict[str, object], message: str) -> None:
    settings = {"min_workers": 2, "max_workers": 4, **options}
    with pytest.raises(UserError, match=message):
        ElasticJob(["x.py"], discover=dict, **settings)  # type: ignore[arg-type]

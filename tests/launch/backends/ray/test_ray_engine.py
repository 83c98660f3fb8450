"""`--on ray` on a real cluster of two nodes: it trains, also when a worker is killed, and losing a
node is a clear failure."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from farandole.cli import commands
from farandole.errors import UserError
from tests.support.trained import SCRIPT, trained_ranks

if TYPE_CHECKING:
    from conftest import Sandbox

RESTARTED = Path(__file__).parents[2] / "scripts" / "restarted.py"
CLUSTER = Path(__file__).parent / "scripts" / "cluster.py"
LONG = Path(__file__).parents[3] / "train" / "scripts" / "preempted.py"


@contextlib.contextmanager
def running_cluster(sandbox: Sandbox) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, CLUSTER],
        env=sandbox.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.communicate(timeout=200)  # the end of its input ends it, and all of the cluster
        sandbox.wait_until_gone()


@pytest.mark.needs("ray")
@pytest.mark.usefixtures("only_ray")
def test_two_nodes(sandbox: Sandbox, warm_variables: dict[str, str]) -> None:
    known = {"RAY_TMPDIR": str(sandbox.temporary), "RAY_USAGE_STATS_ENABLED": "0"}
    sandbox.environment |= known
    with running_cluster(sandbox) as cluster:
        assert cluster.stdin is not None
        assert cluster.stdout is not None
        address = cluster.stdout.readline().strip()
        on_ray = ("run", "--on", "ray", "--ray-address", address, "--nodes", "2")
        done = sandbox.farandole(*on_ray, SCRIPT, "a b", **warm_variables, TRY_THIS="out")
        assert done.returncode == 0, done.stderr
        assert "farandole: placed by Ray: ray-" in done.stderr
        for facts in trained_ranks(done.stdout, 2):
            assert facts["arguments"] == ["a b"]
            assert facts["variables"] == {"TRY_THIS": "out"}

        again = ("--restarts", "1", "--checkpoint", "every=4steps", RESTARTED, "1:11:kill:0")
        done = sandbox.farandole(*on_ray, *again, **warm_variables)
        assert done.returncode == 0, done.stderr
        assert "all 2 workers start again (1 of 1 restarts), from runs/restarted-" in done.stderr
        assert "[0] going on from runs/restarted-" in done.stdout

        job = sandbox.start_farandole(*on_ray, LONG, **warm_variables)
        ready = [sandbox.folder / f"ready-{rank}" for rank in range(2)]
        sandbox.wait_until(
            lambda: job.poll() is not None or all(path.exists() for path in ready), "both train"
        )
        assert job.poll() is None, job.communicate()
        cluster.stdin.write("lose the second node\n")
        cluster.stdin.flush()
        assert cluster.stdout.readline() == "lost\n"
        done = sandbox.finish(job)
        assert done.returncode not in (0, 2)
        # Ray decides which rank is on which node.
        failed = re.search(r"farandole: rank (\d) on ray-\S+-(\d) failed", done.stderr)
        assert failed is not None, done.stderr
        assert failed[1] == failed[2]
        assert f"the node of the Ray actor node-{failed[1]} was lost" in done.stderr, done.stderr


@pytest.mark.needs("ray")
def test_nobody_listens_at_the_address(sandbox: Sandbox, free_port: str) -> None:
    address = f"127.0.0.1:{free_port}"
    done = sandbox.farandole("run", "--on", "ray", SCRIPT, RAY_ADDRESS=address)
    assert done.returncode == 1
    assert f"farandole: there is no Ray cluster at '{address}': " in done.stderr
    assert "Start one with `ray start --head`" in done.stderr


# Ray's own search (`auto`) finds every cluster of the machine, also those of other tests. So what
# becomes of its outcome is tested with a package that stands in for Ray.
@pytest.mark.parametrize(
    ("init", "said"),
    [
        (
            "raise ConnectionError('Could not find any running Ray instance.')",
            "farandole: there is no Ray cluster at 'auto': Could not find any running Ray instance."
            " Start one with `ray start --head`, or name it: --ray-address HOST:6379\n",
        ),
        (
            "os.write(2, b'Token authentication is enabled\\n'); os.abort()",
            "Ray ended its own process (exit code -6) when it connected to the cluster at 'auto'. "
            "If you mean another one, name it: --ray-address HOST:6379.",
        ),
    ],
)
def test_the_search_for_a_cluster_fails(sandbox: Sandbox, init: str, said: str) -> None:
    package = sandbox.folder / "stand-in" / "ray"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"import os\n\ndef init(**settings):\n    {init}\n")
    path = os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")])
    done = sandbox.farandole("run", "--on", "ray", SCRIPT, PYTHONPATH=path, RAY_ADDRESS="auto")
    assert done.returncode == 1
    assert said in done.stderr
    if "abort" in init:
        assert done.stderr.endswith("Token authentication is enabled\n")


def refused(*arguments: str) -> BaseException | None:
    return CliRunner().invoke(commands, ["run", "--on", "ray", *arguments, str(SCRIPT)]).exception


@pytest.mark.needs("ray")
def test_addresses_that_no_job_can_use() -> None:
    error = refused("--ray-address", "ray://host:10001")
    assert isinstance(error, UserError)
    assert "the workers could not reach this host" in str(error)
    error = refused("--ray-address", "local")
    assert isinstance(error, UserError)
    assert "Ray would start a cluster of its own" in str(error)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    error = refused("--nodes", "2")
    assert isinstance(error, UserError)
    assert "pip install 'farandole[ray]'" in str(error)

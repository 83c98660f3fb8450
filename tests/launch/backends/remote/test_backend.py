"""Jobs on hosts that a channel reaches: those that cannot take part are told by name.

The channels of these tests start the agent on this machine, or something else in its place.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from farandole.errors import LaunchError
from farandole.launch.backends.base import WorkerSpec
from farandole.launch.backends.remote.backend import RemoteBackend
from farandole.launch.endpoint import LauncherEndpoint
from farandole.launch.job import Job, Outcome
from farandole.launch.job_directory import JobDirectory
from farandole.launch.launcher import launch_on_hosts
from farandole.topology import Host, Topology
from farandole.worker.store.job_store import JobStore

if TYPE_CHECKING:
    from conftest import Sandbox


@dataclass(frozen=True)
class Here:
    """`instead` of the agent's command, by host; `{}` in it is that command."""

    instead: dict[str, list[str]] = field(default_factory=dict)

    def words(self, host: str, command: Sequence[str]) -> list[str]:
        words = self.instead.get(host, ["{}"])
        return [part for word in words for part in (command if word == "{}" else [word])]

    def advice(self, host: str) -> str:
        return f"Try to reach {host}."


@pytest.fixture
def sandboxed(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """With this process in it."""
    monkeypatch.chdir(sandbox.folder)
    for name in ("FARANDOLE_TEST", "TMPDIR", "PYTHONPATH"):
        monkeypatch.setenv(name, sandbox.environment[name])
    monkeypatch.setattr("tempfile.tempdir", None)
    return sandbox


def run(script: Path, channel: Here, hosts: Sequence[str] = ("far",), **options: float) -> Outcome:
    topology = Topology(tuple(Host(host, (rank,)) for rank, host in enumerate(hosts)))
    job = Job(len(hosts), [str(script)])
    return launch_on_hosts(job, topology, channel, ["lo"], **options)


def error_of(outcome: Outcome) -> str:
    assert outcome.failure is not None
    assert outcome.exit_code == 255
    return outcome.failure.error


@pytest.mark.parametrize(
    ("instead", "message"),
    [
        (["env", "/nowhere/python"], f"there is no {sys.executable} on host far. Install the same"),
        (
            [sys.executable, "-I", "-S", "-m", "farandole"],
            f"host far cannot be reached, or {sys.executable} there has no Farandole (exit code 1)",
        ),
        (["sh", "-c", "echo no route >&2; exit 255"], "no route\nhost far cannot be reached"),
        (["sleep", "600"], "host far did not answer within 2 s. Try to reach far."),
        (["sh", "-c", "echo hello; exec sleep 600"], "host far did not answer within 2 s."),
        (
            ["sh", "-c", "printf '\\0farandole agent\\0\\n'; echo broken >&2"],
            "broken\nthe agent of host far failed.",
        ),
    ],
)
def test_a_host_without_an_agent(sandboxed: Sandbox, instead: list[str], message: str) -> None:
    script = sandboxed.script("train.py", "")
    seconds = 2.0 if "sleep" in " ".join(instead) else 300.0
    outcome = run(script, Here({"far": instead}), connect_seconds=seconds)
    assert message in error_of(outcome)
    assert sandboxed.processes() == []


OTHER = """
import dataclasses, sys, time
from pathlib import Path
from farandole.launch.backends.remote.frames import FACTS, MARK, encoded
from farandole.launch.host_facts import facts_of_this_host

facts = facts_of_this_host(Path(sys.argv[1]))
facts = dataclasses.replace(facts, **eval(sys.argv[2]))
sys.stdout.buffer.write(MARK + encoded(FACTS, content=facts.to_json()))
sys.stdout.flush()
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("difference", "message"),
    [
        ("{'torch': '1.0'}", "host far has torch 1.0, and "),
        ("{'script_digest': None}", "train.py is not on host far. Copy it there"),
    ],
)
def test_a_host_that_is_refused(sandboxed: Sandbox, difference: str, message: str) -> None:
    script = sandboxed.script("train.py", "")
    other = str(sandboxed.script("other.py", OTHER))
    outcome = run(script, Here({"far": [sys.executable, other, str(script), difference]}))
    assert message in error_of(outcome)
    assert sandboxed.processes() == []


def test_a_program_that_is_not_here(sandboxed: Sandbox) -> None:
    script = sandboxed.script("train.py", "")
    with pytest.raises(LaunchError, match=r"cannot start `/nowhere/ssh` to reach host far: "):
        run(script, Here({"far": ["/nowhere/ssh"]}))
    assert sandboxed.processes() == []


def test_a_shell_that_talks_first_and_a_host_that_is_lost(sandboxed: Sandbox) -> None:
    talks = ["sh", "-c", 'echo "welcome to far"; exec "$@"', "sh", "{}"]
    script = sandboxed.script("train.py", "print('trained')")
    assert run(script, Here({"far": talks})).exit_code == 0
    lost = sandboxed.script("lost.py", "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)")
    outcome = run(lost, Here())
    assert "host far was lost: the connection to its agent ended. Try to reach far." in error_of(
        outcome
    )
    sandboxed.wait_until_gone()


def test_no_host_waits_for_another_and_a_stop_waits_for_none(sandboxed: Sandbox) -> None:
    """`far` never answers. Its worker is stopped at once, and that of `near` runs meanwhile."""
    script = sandboxed.script("train.py", "from pathlib import Path\nPath('done').write_text('')")
    job = Job(2, [str(script)])
    directory = JobDirectory(job, here=0)
    store = JobStore(directory.folder)
    endpoint = LauncherEndpoint(store, is_shared=True)
    backend = RemoteBackend(job, directory, endpoint, Here({"far": ["sleep", "600"]}))
    far = backend.start(WorkerSpec(0, "far", 1, {"RANK": "0"}))
    near = backend.start(WorkerSpec(1, "near", 1, {"RANK": "1"}))
    sandboxed.wait_until(lambda: near.poll() is not None, "the one that is reached ends")
    assert near.poll() == 0
    assert (sandboxed.folder / "done").exists()
    assert far.poll() is None
    far.stop()
    assert far.poll() == -signal.SIGTERM
    backend.close()
    directory.reap()
    directory.close(keep_logs=False)
    store.close()
    assert sandboxed.processes() == []

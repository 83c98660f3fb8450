"""Jobs on hosts that a channel reaches: those that cannot take part are told by name.

The channels of these tests start the agent on this machine, or something else in its place.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest

from farandole.errors import LaunchError
from farandole.launch.backends.base import WorkerSpec
from farandole.launch.backends.remote.backend import RemoteBackend
from farandole.launch.backends.remote.worker import RemoteWorker
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
    name: ClassVar[str] = "hand"

    def words(self, host: str, command: Sequence[str]) -> list[str]:
        words = self.instead.get(host, ["{}"])
        return [part for word in words for part in (command if word == "{}" else [word])]

    def advice(self, host: str) -> str:
        return f"Try to reach {host}."

    def address_of(self, host: str) -> str:
        return host


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


def refused(sandbox: Sandbox, channel: Here, **options: float) -> str:
    """What is said of the host. Nothing has started, and nothing is left."""
    script = sandbox.script("train.py", "from pathlib import Path; Path('started').touch()")
    with pytest.raises(LaunchError) as raised:
        run(script, channel, ("near", "far"), **options)
    assert sandbox.processes() == []
    assert not (sandbox.folder / "started").exists()
    first, rest = str(raised.value).split("\n", 1)
    assert first == "the job was not started."
    return rest


@pytest.mark.parametrize(
    ("instead", "message"),
    [
        (["env", "/nowhere/python"], f"host far: there is no Python at {sys.executable} (env: "),
        (
            [sys.executable, "-I", "-S", "-m", "farandole"],
            "host far: Farandole does not start there: ",
        ),
        (
            ["sh", "-c", "echo no route >&2; exit 255"],
            "host far: it cannot be reached by hand: no route. Try to reach far.",
        ),
        (["sleep", "600"], "host far: it did not answer within 2 s. Try to reach far."),
        (["sh", "-c", "echo hello; exec sleep 600"], "host far: it did not answer within 2 s."),
        (
            ["sh", "-c", "printf '\\0farandole agent\\0\\n'; echo broken >&2"],
            "host far: Farandole does not start there: broken (exit code 0).",
        ),
    ],
)
def test_a_host_without_an_agent(sandboxed: Sandbox, instead: list[str], message: str) -> None:
    seconds = 2.0 if "sleep" in " ".join(instead) else 300.0
    # Within so short a time no other host need answer.
    assert message in refused(sandboxed, Here({"far": instead}), connect_seconds=seconds)


OTHER = """
import dataclasses, sys, time
from pathlib import Path
from farandole.launch.backends.remote.frames import FACTS, MARK, encoded
from farandole.launch.host_facts import JobFiles, facts_of_this_host

facts = facts_of_this_host(JobFiles("/", str(Path("train.py").absolute())))
facts = dataclasses.replace(facts, **eval(sys.argv[1]))
sys.stdout.buffer.write(MARK + encoded(FACTS, content=facts.to_json()))
sys.stdout.flush()
sys.stdin.buffer.read()
"""


@pytest.mark.parametrize(
    ("difference", "message"),
    [
        ("{'torch': '1.0'}", "host far: it has torch 1.0, and this host has "),
        ("{'script': None}", "train.py is not there (in "),
        ("{'clock_seconds': time.time() - 3600}", "host far: its clock is 60 minutes behind this"),
        ("{'no_way_back': 'x:1: refused'}", "far: it cannot connect to this host at x:1: refused."),
    ],
)
def test_a_host_that_is_refused(sandboxed: Sandbox, difference: str, message: str) -> None:
    other = str(sandboxed.script("other.py", OTHER))
    assert message in refused(sandboxed, Here({"far": [sys.executable, other, difference]}))


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
    assert outcome.failure is not None
    assert outcome.exit_code == 255
    said = "host far was lost: the connection to its agent ended. Try to reach far."
    assert said in outcome.failure.error
    sandboxed.wait_until_gone()


class Opened:
    """A backend for two workers that run `text`, without a policy."""

    def __init__(self, sandbox: Sandbox, text: str, channel: Here) -> None:
        job = Job(2, [str(sandbox.script("train.py", text))])
        self.directory = JobDirectory(job, here=0)
        self._store = JobStore(self.directory.folder)
        endpoint = LauncherEndpoint(self._store, is_shared=True)
        self._backend = RemoteBackend(job, self.directory, endpoint, channel)

    def start(self, number: int, host: str) -> RemoteWorker:
        return self._backend.start(WorkerSpec(number, host, 1, {"RANK": str(number)}))

    def close(self) -> None:
        self._backend.close()
        self.directory.reap()
        self.directory.close(keep_logs=False)
        self._store.close()


@pytest.fixture
def open_backend(sandboxed: Sandbox) -> Iterator[Callable[[str, Here], Opened]]:
    opened: list[Opened] = []

    def make(text: str, channel: Here) -> Opened:
        opened.append(Opened(sandboxed, text, channel))
        return opened[-1]

    yield make
    for each in opened:
        each.close()
    assert sandboxed.processes() == []


def test_no_host_waits_for_another_and_a_stop_waits_for_none(
    sandboxed: Sandbox, open_backend: Callable[[str, Here], Opened]
) -> None:
    """`far` never answers. Its worker is stopped at once, and that of `near` runs meanwhile."""
    backend = open_backend("print('trained')", Here({"far": ["sleep", "600"]}))
    far = backend.start(0, "far")
    near = backend.start(1, "near")
    sandboxed.wait_until(lambda: near.poll() is not None, "the one that is reached ends")
    assert near.poll() == 0
    assert backend.directory.stdout_file(1).read_text() == "trained\n"
    assert far.poll() is None
    far.stop()
    assert far.poll() == -signal.SIGTERM


def test_a_host_that_was_lost_can_be_used_again(
    sandboxed: Sandbox, open_backend: Callable[[str, Here], Opened]
) -> None:
    """As an elastic job does, which starts another worker in place of each that is lost."""
    backend = open_backend(
        "import os, signal, time\nfrom pathlib import Path\n"
        "if os.environ['RANK'] == '0':\n    os.kill(os.getppid(), signal.SIGKILL)\n"
        "    time.sleep(600)\n",
        Here(),
    )
    first = backend.start(0, "far")
    sandboxed.wait_until(lambda: first.poll() is not None, "the agent's end is noticed")
    assert first.poll() == 255
    assert "host far was lost" in first.advice
    second = backend.start(1, "far")
    sandboxed.wait_until(lambda: second.poll() is not None, "the other ends")
    assert second.poll() == 0

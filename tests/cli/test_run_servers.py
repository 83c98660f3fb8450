"""Parameter servers on the command line: `run --servers`, `race --servers` and `server`.

The servers are stand-ins. What the launcher does with workers is in
tests/launch/policies/test_tolerant*.py.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from farandole.cli import main
from farandole.launch import launcher, servers
from farandole.race.runner import Entry, RaceConfig
from farandole.sync import Local

Command = Callable[..., tuple[int, str, str]]
ADDRESS = "tcp://127.0.0.1:40123"


class Cluster:
    """Stands in for `farandole.server.cluster.Cluster`."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.events: list[str] = []
        self.checks: Iterator[list[str] | None] = iter([None, ["server 1 was killed"]])
        self.environment = {
            "FARANDOLE_SERVERS": ADDRESS,
            "FARANDOLE_SERVER_KEY": str(options.get("key_file") or "/made/for it.key"),
        }

    def __enter__(self) -> Cluster:
        self.events.append("start")
        return self

    def __exit__(self, *_: object) -> None:
        self.events.append("end")

    def lost(self, rank: int) -> None:
        self.events.append(f"lost {rank}")

    def restarted(self, rank: int) -> None:
        self.events.append(f"restarted {rank}")

    def check(self) -> list[str] | None:
        for answer in self.checks:
            return answer
        os.kill(os.getpid(), signal.SIGTERM)  # somebody has seen enough
        return None


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Runs the command line in this process; its exit code, its output and its errors.

    There `local` needs servers, and no other strategy does.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("farandole.launch.probes.crowding.usable_cores", lambda: 64)
    (tmp_path / "train.py").touch()
    (tmp_path / "a.key").touch()
    monkeypatch.setattr(Local, "needs_servers", True, raising=False)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["farandole", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        shown = capsys.readouterr()
        return int(end.value.code or 0), shown.out, shown.err

    return run


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> list[Cluster]:
    """Those that were started."""
    made: list[Cluster] = []

    def make(**options: Any) -> Cluster:
        made.append(Cluster(**options))
        return made[-1]

    module = types.SimpleNamespace(Cluster=make)
    monkeypatch.setitem(sys.modules, "farandole.server.cluster", module)
    return made


@pytest.fixture
def supervised(monkeypatch: pytest.MonkeyPatch) -> list[launcher.Job]:
    """The jobs that would have been run, each of which loses rank 1 and gets it back."""
    jobs: list[launcher.Job] = []

    def supervise(
        job: launcher.Job,
        *,
        on_lost: Callable[[int], None],
        on_restart: Callable[[int], None],
        check: Callable[[], object],
    ) -> launcher.Outcome:
        jobs.append(job)
        on_lost(1)
        on_restart(1)
        check()
        return launcher.Outcome()

    monkeypatch.setattr(servers, "launch_tolerant", supervise)
    return jobs


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[launcher.Job]:
    """The jobs that would have been run without servers of their own."""
    jobs: list[launcher.Job] = []

    def launch(job: launcher.Job) -> launcher.Outcome:
        jobs.append(job)
        return launcher.Outcome()

    monkeypatch.setattr(launcher, "launch", launch)
    return jobs


# run


def test_servers_of_a_job(
    command: Command, clusters: list[Cluster], supervised: list[launcher.Job]
) -> None:
    asked = ("--servers", "3", "--replicas", "2", "--functions", "mine", "--functions", "yours")
    sync = ("--sync", "local:every=3", "--restarts", "4")
    assert command("run", "-n", "5", *asked, *sync, "train.py", "--servers", "9") == (0, "", "")
    ((cluster,), (job,)) = clusters, supervised
    assert cluster.options == {
        "servers": 3,
        "replicas": 2,
        "functions": ("mine", "yours"),
        "workers": 5,
    }
    assert cluster.events == ["start", "lost 1", "restarted 1", "end"]
    assert job.environment == {
        "FARANDOLE_SCRIPT": "train.py",
        "FARANDOLE_SYNC": "local:every=3",
        **cluster.environment,
    }
    assert (job.workers, job.tolerant, job.restarts) == (5, True, 4)
    assert job.command == ("train.py", "--servers", "9")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--sync", "local"), (1, 0)),  # it needs one
        (("--sync", "local", "--servers", "1"), (1, 0)),
        (("--sync", "local", "--servers", "4"), (4, 1)),
        (("--sync", "local", "--servers", "4", "--replicas", "0"), (4, 0)),
        (("--servers", "2"), (2, 1)),  # the script decides how to use them
    ],
)
def test_how_many(
    command: Command,
    clusters: list[Cluster],
    supervised: list[launcher.Job],
    arguments: tuple[str, ...],
    expected: tuple[int, int],
) -> None:
    assert command("run", "-n", "2", *arguments, "train.py")[0] == 0
    assert (clusters[0].options["servers"], clusters[0].options["replicas"]) == expected


def test_servers_of_somebody_else(
    command: Command, clusters: list[Cluster], launched: list[launcher.Job], tmp_path: Path
) -> None:
    asked = ("--servers", ADDRESS, "--key-file", "a.key", "--restarts", "1")
    assert command("run", "-n", "2", *asked, "--sync", "local", "train.py")[0] == 0
    (job,) = launched
    assert (job.tolerant, job.restarts) == (True, 1)
    assert job.environment["FARANDOLE_SERVERS"] == ADDRESS
    assert job.environment["FARANDOLE_SERVER_KEY"] == str(tmp_path / "a.key")
    assert not clusters


def test_jobs_without_servers_are_as_ever(
    command: Command, clusters: list[Cluster], launched: list[launcher.Job]
) -> None:
    for sync in ((), ("--sync", "allreduce")):
        assert command("run", "-n", "2", *sync, "train.py") == (0, "", "")
        assert not launched[-1].tolerant
        assert not {"FARANDOLE_SERVERS", "FARANDOLE_SERVER_KEY"} & launched[-1].environment.keys()
    assert not clusters


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--servers 2 --sync allreduce", "--servers 2: --sync allreduce needs no parameter server"),
        (f"--servers {ADDRESS} --sync allreduce", "--sync allreduce needs no parameter servers"),
        ("--servers 0", "--servers 0: ask for at least 1."),
        ("--servers -1", "--servers -1: ask for at least 1."),
        ("--servers two", "--servers 'two': give a number of servers to start, or the address"),
        ("--servers 1.5", "--servers '1.5': give a number"),
        ("--servers 2 --replicas 2", "--servers 2 can keep at most 1. Give --servers 3 or more."),
        ("--sync local --replicas 1", "--servers 1 can keep at most 0. Give --servers 2 or more."),
        ("--servers 2 --replicas -1", "--replicas -1: ask for 0 or more."),
        ("--servers 2 --key-file a.key", "--key-file a.key is for servers at an address"),
        ("--replicas 1", "--replicas is for parameter servers, and this job has none."),
        ("--functions m --sync allreduce", "--functions is for parameter servers"),
        ("--key-file a.key", "--key-file is for parameter servers"),
        ("--servers 1 --restarts -1", "restarts=-1"),
        (f"--servers {ADDRESS}", f"--servers {ADDRESS} needs the servers' key: --key-file FILE"),
        (f"--servers {ADDRESS} --key-file no.key", "there is no key file no.key."),
        (f"--servers {ADDRESS} --key-file a.key --replicas 1", "--replicas is for servers that"),
        (f"--servers {ADDRESS} --key-file a.key --functions m", "--functions is for servers that"),
        ("--servers tcp://node --key-file a.key", "--servers 'tcp://node' is not an address such"),
        ("--servers tcp://n:99999 --key-file a.key", "--servers 'tcp://n:99999' is not an address"),
    ],
)
def test_what_does_not_go_together(
    command: Command,
    clusters: list[Cluster],
    launched: list[launcher.Job],
    arguments: str,
    message: str,
) -> None:
    code, _, error = command("run", "-n", "2", *arguments.split(), "train.py")
    assert code == 2
    assert error.startswith("farandole: ")
    assert message in error
    assert not clusters
    assert not launched


# race


def test_the_lanes_that_need_servers_get_them(tmp_path: Path) -> None:
    config = RaceConfig(["train.py"], tmp_path, 7, servers=3, replicas=0)
    needs, other = Entry("local", 2, needs_servers=True), Entry("allreduce", 2)
    assert shlex.join(config.arguments(needs)) == (
        "run -n 2 --sync local --servers 3 --replicas 0 --seed 7 train.py"
    )
    assert shlex.join(config.arguments(other)) == "run -n 2 --sync allreduce --seed 7 train.py"
    unsaid = RaceConfig(["train.py"], tmp_path, 7)
    assert shlex.join(unsaid.arguments(needs)) == "run -n 2 --sync local --seed 7 train.py"


def test_a_race_knows_which_lanes_need_servers(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[RaceConfig, Entry]] = []

    def run_lane(config: RaceConfig, entry: Entry, number: int) -> Iterator[Any]:
        started.append((config, entry))
        raise KeyboardInterrupt

    monkeypatch.setattr("farandole.race.runner.run_lane", run_lane)
    before = signal.getsignal(signal.SIGTERM)
    code, _, _ = command("race", "-n", "2", "--servers", "2", "--sync", "local", "train.py")
    signal.signal(signal.SIGTERM, before)
    assert code == 130
    ((config, entry),) = started
    assert (config.servers, config.replicas) == (2, None)
    assert entry.needs_servers


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--servers 2 --sync allreduce", "--servers 2: no strategy in this race needs parameter"),
        ("--replicas 1 --sync allreduce", "--replicas 1: no strategy in this race needs"),
        ("--servers 2 --replicas 2 --sync local --sync allreduce", "can keep at most 1"),
        ("--servers 0 --sync local", "--servers 0: ask for at least 1."),
    ],
)
def test_what_a_race_refuses(command: Command, arguments: str, message: str) -> None:
    code, _, error = command("race", "-n", "2", *arguments.split(), "train.py")
    assert code == 2
    assert message in error


# server


def test_servers_for_anyone(command: Command, clusters: list[Cluster]) -> None:
    code, said, error = command("server", "--servers", "2", "--functions", "mine")
    assert code == 0
    (cluster,) = clusters
    assert cluster.options == {
        "servers": 2,
        "replicas": 1,
        "functions": ("mine",),
        "bind": "127.0.0.1:0",
        "key_file": None,
    }
    first, run, connect = said.splitlines()
    assert first == f"2 server(s) at {ADDRESS}, key file /made/for it.key. Ctrl-C ends them."
    words = shlex.split(run)
    assert words[words.index("--servers") + 1] == ADDRESS
    assert words[words.index("--key-file") + 1] == "/made/for it.key"
    assert connect == f"  fd.server.connect('{ADDRESS}', '/made/for it.key')"
    assert error.splitlines() == [
        "farandole: server 1 was killed",
        "farandole: stopped by SIGTERM; no server is left",
    ]
    assert cluster.events == ["start", "end"]


def test_servers_for_other_hosts(command: Command, clusters: list[Cluster]) -> None:
    asked = ("--bind", "10.0.0.5:4100", "--key-file", "a.key")
    assert command("server", *asked)[0] == 0
    assert clusters[0].options["bind"] == "10.0.0.5:4100"
    assert clusters[0].options["key_file"] == Path("a.key")
    assert (clusters[0].options["servers"], clusters[0].options["replicas"]) == (1, 0)


@pytest.mark.parametrize(
    ("address", "bind"),
    [(ADDRESS, "127.0.0.1:0"), ("tcp://node1:4100", "10.0.0.6:0")],
)
def test_one_more_server(
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    address: str,
    bind: str,
) -> None:
    joined: list[tuple[str, Path, str, tuple[str, ...]]] = []

    def join_cluster(address: str, key_file: Path, bind: str, functions: tuple[str, ...]) -> None:
        joined.append((address, key_file, bind, functions))
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()

    module = types.SimpleNamespace(join_cluster=join_cluster)
    monkeypatch.setitem(sys.modules, "farandole.server.cluster", module)
    before = signal.getsignal(signal.SIGTERM)
    more = ("--key-file", "a.key", "--bind", bind, "--functions", "mine")
    code, said, error = command("server", "--join", address, *more)
    assert (code, said) == (0, f"one more server for {address}. Ctrl-C ends it.\n")
    assert error == "farandole: stopped; the others go on\n"
    assert joined == [(address, tmp_path / "a.key", bind, ("mine",))]
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--bind 10.0.0.5:4100", "--bind 10.0.0.5:4100: other hosts can reach that"),
        ("--bind 0.0.0.0:0", "--bind 0.0.0.0:0: other hosts can reach that"),
        ("--bind 10.0.0.5", "--bind '10.0.0.5' is not an address and a port"),
        ("--bind :4100", "--bind ':4100' is not an address and a port"),
        ("--bind 127.0.0.1:70000", "--bind '127.0.0.1:70000' is not an address and a port"),
        ("--servers 0", "--servers 0: ask for at least 1."),
        ("--servers 2 --replicas 5", "--servers 2 can keep at most 1"),
        (f"--join {ADDRESS}", f"--join {ADDRESS} needs the servers' key"),
        (f"--join {ADDRESS} --key-file no.key", "there is no key file no.key"),
        (f"--join {ADDRESS} --key-file a.key --servers 2", "which know their --servers"),
        (f"--join {ADDRESS} --key-file a.key --replicas 0", "which know their --replicas"),
        ("--join node1:4100 --key-file a.key", "--join 'node1:4100' is not an address such as"),
        (
            "--join tcp://node1:4100 --key-file a.key",
            "--bind 127.0.0.1:0: the servers at tcp://node1:4100 cannot reach that",
        ),
    ],
)
def test_servers_that_cannot_be(
    command: Command, clusters: list[Cluster], arguments: str, message: str
) -> None:
    code, _, error = command("server", *arguments.split())
    assert code == 2
    assert error.startswith("farandole: ")
    assert message in error
    assert not clusters

"""`farandole run`: what it refuses, before anything is started, and what it suggests instead."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from farandole.cli import main
from farandole.launch import launcher
from farandole.sync import STRATEGIES

if TYPE_CHECKING:
    from conftest import Sandbox

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Runs the command line in this process, in an empty folder; its exit code and its errors."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "evaluate.py"):
        (tmp_path / name).touch()

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["farandole", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        return int(end.value.code or 0), capsys.readouterr().err

    return run


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[launcher.Job]:
    """The jobs that would have been launched."""
    jobs: list[launcher.Job] = []

    def launch(job: launcher.Job) -> launcher.Outcome:
        jobs.append(job)
        return launcher.Outcome()

    monkeypatch.setattr(launcher, "launch", launch)
    return jobs


@pytest.mark.parametrize("workers", ["0", "-1"])
def test_a_job_needs_a_worker(command: Command, started: list[launcher.Job], workers: str) -> None:
    assert command("run", "-n", workers, "train.py") == (
        2,
        f"farandole: -n {workers}: a job needs at least 1 worker.\n",
    )
    assert not started


@pytest.mark.parametrize(
    ("script", "hint"),
    [
        ("trian.py", "Did you mean 'train.py'?"),
        ("train", "Did you mean 'train.py'?"),
        ("zzz", "Known: evaluate.py, train.py."),
        ("nowhere/train.py", ""),
    ],
)
def test_a_missing_script(
    command: Command, started: list[launcher.Job], tmp_path: Path, script: str, hint: str
) -> None:
    code, error = command("run", "-n", "2", script)
    assert code == 2
    where = f"farandole: there is no script {script!r} here ({tmp_path})."
    assert error == " ".join(filter(None, (where, hint))) + "\n"
    assert not started


@pytest.mark.parametrize(
    ("sync", "message"),
    [
        ("alreduce", "there is no strategy 'alreduce'. Did you mean 'allreduce'?"),
        ("", f"there is no strategy ''. Known: {', '.join(sorted(STRATEGIES))}."),
        (
            "allreduce:buckt_mib=5",
            "strategy 'allreduce' has no option 'buckt_mib'. Did you mean 'bucket_mib'?",
        ),
        ("allreduce:bucket_mib=big", "strategy 'allreduce': bucket_mib='big' is not a number."),
        ("allreduce:bucket_mib=0", "allreduce: bucket_mib=0 must be above 0."),
        ("allreduce:bucket_mib=nan", "bucket_mib='nan' is not a number."),
        ("allreduce:batchnorm=synch", "batchnorm='synch' is not a choice. Did you mean 'sync'?"),
        ("allreduce:bucket_mib=5,bucket_mib=6", "option 'bucket_mib' is given twice"),
    ],
)
def test_a_strategy_that_cannot_be(
    command: Command, started: list[launcher.Job], sync: str, message: str
) -> None:
    code, error = command("run", "-n", "2", "--sync", sync, "train.py")
    assert code == 2
    assert error.startswith("farandole: ")
    assert message in error
    assert not started


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--wrkers", "2", "train.py"], "No such option '--wrkers'"),
        (["-n", "two", "train.py"], "'two' is not a valid integer"),
        (["--seed", "x", "train.py"], "'x' is not a valid integer"),
        (
            ["-n", "4", "--pretend-hosts", "2", "--sync", "hogwild", "train.py"],
            "hogwild trains in the memory of one host, and the 4 ranks are on 2",
        ),
        ([], "Missing argument 'SCRIPT'"),
    ],
)
def test_a_command_line_that_cannot_be(
    command: Command, started: list[launcher.Job], arguments: list[str], message: str
) -> None:
    code, error = command("run", *arguments)
    assert code == 2
    assert message in error
    assert not started


def test_what_is_not_said_is_left_to_the_script(
    command: Command, started: list[launcher.Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    for gpus, workers in ((0, 1), (4, 4)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert command("run", "train.py") == (0, "")
        assert started[-1].workers == workers
        assert started[-1].environment == {"FARANDOLE_SCRIPT": "train.py"}


def test_the_strategy_travels_in_its_shortest_form(
    command: Command, started: list[launcher.Job]
) -> None:
    command(
        "run",
        "-n",
        "2",
        "--sync",
        "allreduce:bucket_mib=2.50,algorithm=ring",
        "train.py",
        "--unused",
    )
    assert started[0].environment["FARANDOLE_SYNC"] == "allreduce:bucket_mib=2.5,algorithm=ring"
    assert started[0].command == ("train.py", "--unused")


def test_the_transport_travels_too(command: Command, started: list[launcher.Job]) -> None:
    command("run", "--transport", "c10d", "train.py")
    assert started[0].environment["FARANDOLE_TRANSPORT"] == "c10d"


def test_workers_that_share_cores_are_warned_of_once(
    command: Command, started: list[launcher.Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farandole.launch.probes.crowding.usable_cores", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    told = "farandole: warning: host localhost: 8 workers share 2 cores. Give it at most 2: -n 2\n"
    assert command("run", "-n", "8", "train.py") == (0, told)
    assert command("run", "-n", "2", "train.py") == (0, "")
    assert [job.workers for job in started] == [8, 2]


def test_our_option_behind_the_script_is_noted_and_passed_on(
    command: Command, started: list[launcher.Job]
) -> None:
    code, said = command("run", "train.py", "-n", "2")
    assert code == 0
    assert "-n after the script is the script's own" in said
    assert started[-1].command == ("train.py", "-n", "2")
    assert command("run", "-n", "1", "train.py", "-n", "2") == (0, "")


def test_errors_are_one_line_from_the_shell_too(sandbox: Sandbox) -> None:
    done = sandbox.python("-m", "farandole", "run", "-n", "0", "train.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "farandole: -n 0: a job needs at least 1 worker.\n"


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # so that an import fails
from farandole.cli import main
sys.argv = ["farandole", "run", "-n", "2", "--name", "x", sys.argv[1]]
main()
"""


@pytest.mark.fresh
def test_a_job_whose_options_need_no_torch_starts_without_it(sandbox: Sandbox) -> None:
    """The workers import it, at the same time, and nobody waits for the launcher to do so first."""
    script = sandbox.script("hello.py", "import torch; print(torch.ones(1).item())")
    done = sandbox.python(sandbox.script("launcher.py", WITHOUT_TORCH), script)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] 1.0", "[1] 1.0"]

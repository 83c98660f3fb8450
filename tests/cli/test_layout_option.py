"""`farandole run --layout`: what it refuses before anything is started, and what travels."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from farandole.cli import main
from farandole.launch import launcher
from farandole.schedule.pipelines import schedule_names

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Runs `farandole run … train.py` in this process; its exit code and its errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("farandole.launch.probes.crowding.usable_cores", lambda: 64)
    (tmp_path / "train.py").touch()

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["farandole", "run", *arguments, "train.py"])
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


@pytest.mark.parametrize(
    ("layout", "travels"),
    [
        ("stages=4,microbatches=8", "stages=4,microbatches=8"),
        ("stages=4, schedule=1f1b", "stages=4"),  # the shortest form
        ("whole", "whole"),
        (" whole ", "whole"),
        ("stages=1", "whole"),
        ("stages=auto", "stages=auto"),
        ("stages=2,replicas=3+1", "stages=2,replicas=3+1"),
    ],
)
def test_the_layout_travels(
    command: Command, started: list[launcher.Job], layout: str, travels: str
) -> None:
    assert command("-n", "4", "--layout", layout) == (0, "")
    assert started[0].environment["FARANDOLE_LAYOUT"] == travels


def test_without_one_the_script_decides(command: Command, started: list[launcher.Job]) -> None:
    assert command("-n", "4") == (0, "")
    assert "FARANDOLE_LAYOUT" not in started[0].environment


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("stage=4", "layout has no option 'stage'. Did you mean 'stages'?"),
        ("stages=four", "stages='four' is neither a whole number nor auto."),
        ("stages=0", "stages=0 must be at least 1."),
        ("stages=4,schedule=gpype", "schedule='gpype' is not a choice. Did you mean 'gpipe'?"),
        ("stages=4,microbatches", "option 'microbatches' needs a value"),
        ("", "an empty layout: write stages=4,microbatches=8, say, or whole."),
        ("none", "no option 'none'. Known: "),
        ("none", ". For the whole model on every worker write whole."),
    ],
)
def test_a_layout_that_cannot_be(
    command: Command, started: list[launcher.Job], layout: str, message: str
) -> None:
    code, error = command("-n", "4", "--layout", layout)
    assert code == 2
    assert error.startswith("farandole: ")
    assert error.count("\n") == 1
    assert message in error
    assert not started


@pytest.mark.parametrize(
    ("workers", "layout", "ranks", "nearest"),
    [
        (2, "stages=4,microbatches=8", 4, 4),
        (5, "stages=4", 4, 4),
        (6, "stages=4", 4, 4),  # as near as 8, and sure to be there
        (7, "stages=4", 4, 8),
        (6, "stages=2,replicas=3+1", 4, 4),
        (3, "stages=4,schedule=interleaved", 2, 2),
    ],
)
def test_workers_must_make_whole_replicas(
    command: Command,
    started: list[launcher.Job],
    workers: int,
    layout: str,
    ranks: int,
    nearest: int,
) -> None:
    code, error = command("-n", str(workers), "--layout", layout)
    assert code == 2
    assert f"layout {layout}: one replica takes {ranks} workers, and {workers} is no" in error
    assert error.endswith(f": -n {nearest}.\n")
    assert not started
    assert command("-n", str(nearest), "--layout", layout) == (0, "")


def test_a_trace_of_a_job_that_cannot_be_leaves_nothing(command: Command, tmp_path: Path) -> None:
    assert command("-n", "3", "--layout", "stages=2", "--trace", "out.json")[0] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_help_names_every_schedule_without_torch() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from farandole.cli import commands\n"
        "for name in ('run', 'race'): print(CliRunner().invoke(commands, [name, '-h']).output)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150)
    assert done.stdout.endswith("False\n"), done.stderr
    unwrapped = "".join(done.stdout.split())
    assert unwrapped.count(f"Schedules:{','.join(schedule_names())}.") == 2

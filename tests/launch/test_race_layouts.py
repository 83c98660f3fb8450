"""A race over layouts: its lanes are the product, and each is told apart in every place."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from farandole.cli import main
from farandole.launch.race import Course, Entry, folder_name, run_lane
from farandole.report import Lane

Race = Callable[..., list[str]]

SAYS_ITS_LAYOUT = """
import farandole as fd
run = fd.init()
print("layout", run.settings.layout)
"""


@pytest.fixture
def race(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Race]:
    """Runs `farandole race … train.py`; the commands of its lanes, which are not started."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    commands: list[str] = []

    def only_note(course: Course, entry: Entry, number: int) -> Iterator[Lane]:
        commands.append(shlex.join(course.arguments(entry)))
        yield replace(course.lane(entry), outcome="ok")

    def run(*arguments: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["farandole", "race", *arguments, "train.py"])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 0, capsys.readouterr().err
        return commands

    monkeypatch.setattr("farandole.launch.race.run_lane", only_note)
    # By its name in `farandole.cli` one finds the command, which is called as its module is.
    monkeypatch.setattr(sys.modules["farandole.cli.race"], "_finish", lambda *_: None)
    before = signal.getsignal(signal.SIGTERM)
    yield run
    signal.signal(signal.SIGTERM, before)


def test_layouts_alone_are_runners(race: Race) -> None:
    layouts = ("whole", "stages=4,microbatches=8", "stages=4,schedule=pipedream")
    given = [word for layout in layouts for word in ("--layout", layout)]
    assert race("-n", "4", *given) == [
        f"run -n 4 --layout {layout} --seed 0 train.py" for layout in layouts
    ]


def test_every_layout_runs_with_every_strategy(race: Race) -> None:
    layouts = ("--layout", "whole", "--layout", "stages=2,schedule=1f1b")
    syncs = ("--sync", "allreduce", "--sync", "server")
    assert race("-n", "4", "--hosts", "2", *layouts, *syncs, "--servers", "3", "--serial") == [
        "run -n 1 --layout whole --seed 0 train.py",
        "run -n 4 --hosts 2 --layout whole --sync allreduce --seed 0 train.py",
        "run -n 4 --hosts 2 --layout whole --sync server --servers 3 --seed 0 train.py",
        "run -n 4 --hosts 2 --layout stages=2 --sync allreduce --seed 0 train.py",
        "run -n 4 --hosts 2 --layout stages=2 --sync server --servers 3 --seed 0 train.py",
    ]


def test_without_layouts_the_script_keeps_its_own(race: Race) -> None:
    assert race("-n", "4", "--sync", "daso") == ["run -n 4 --sync daso --seed 0 train.py"]


@pytest.mark.parametrize(
    ("layout", "message"),
    [("stage=2", "Did you mean 'stages'?"), ("stages=3", "and 4 is no multiple of that")],
)
def test_a_later_lane_that_cannot_be_is_found_before_the_first(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    layout: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    command = ["farandole", "race", "-n", "4", "--layout", "whole", "--layout", layout, "train.py"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("entry", "name", "folder"),
    [
        (Entry(None, 1), "serial", "7-serial"),
        (Entry("daso", 4), "daso", "7-daso"),
        (Entry(None, 4, layout="whole"), "whole", "7-whole"),
        (
            Entry("local:every=8", 4, layout="stages=2,microbatches=8"),
            "stages=2,microbatches=8 · local:every=8",
            "7-stages-2-microbatches-8-local-every-8",
        ),
    ],
)
def test_lanes_have_readable_names(tmp_path: Path, entry: Entry, name: str, folder: str) -> None:
    lane = Course(["train.py"], tmp_path, 0).lane(entry)
    assert lane.name == name
    assert folder_name(7, lane) == folder


def test_a_long_list_of_cuts_is_no_long_name_of_a_folder(tmp_path: Path) -> None:
    cuts = "+".join(f"body.layer{number}" for number in range(40))
    lane = Course(["train.py"], tmp_path, 0).lane(Entry(None, 4, layout=f"stages=4,cuts={cuts}"))
    (tmp_path / folder_name(2, lane)).mkdir()
    assert len(folder_name(2, lane)) <= 100


def test_the_ranks_of_a_lane_are_told_its_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "says.py").write_text(SAYS_ITS_LAYOUT)
    course = Course(["says.py"], tmp_path / "runs", 0)
    for _ in run_lane(course, Entry(None, 2, layout="stages=2,microbatches=4"), 1):
        pass
    output = (tmp_path / "runs" / "1-stages-2-microbatches-4" / "output.log").read_text()
    for rank in (0, 1):
        assert f"[{rank}] layout stages=2,microbatches=4\n" in output

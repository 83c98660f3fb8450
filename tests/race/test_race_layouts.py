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
from farandole.errors import UserError
from farandole.race.checks import check_entries, checked_policy
from farandole.race.runner import Entry, RaceConfig, folder_name, run_lane
from farandole.report.lane import Lane

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

    def only_note(config: RaceConfig, entry: Entry, number: int) -> Iterator[Lane]:
        commands.append(shlex.join(config.arguments(entry)))
        yield replace(config.lane(entry), outcome="ok")

    def run(*arguments: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["farandole", "race", *arguments, "train.py"])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 0, capsys.readouterr().err
        return commands

    monkeypatch.setattr("farandole.race.runner.run_lane", only_note)
    monkeypatch.setattr("farandole.race.race.finish", lambda *_: None)
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
    syncs = ("--sync", "allreduce", "--sync", "daso")
    assert race("-n", "4", "--pretend-hosts", "2", *layouts, *syncs, "--serial") == [
        "run -n 1 --layout whole --seed 0 train.py",
        "run -n 4 --pretend-hosts 2 --layout whole --sync allreduce --seed 0 train.py",
        "run -n 4 --pretend-hosts 2 --layout whole --sync daso --seed 0 train.py",
        "run -n 4 --pretend-hosts 2 --layout stages=2,schedule=1f1b --sync allreduce --seed 0 "
        "train.py",
        "run -n 4 --pretend-hosts 2 --layout stages=2,schedule=1f1b --sync daso --seed 0 train.py",
    ]


def test_servers_are_for_the_lanes_that_need_them(race: Race) -> None:
    syncs = ("--sync", "allreduce", "--sync", "server")
    assert race("-n", "4", "--layout", "whole", *syncs, "--servers", "3") == [
        "run -n 4 --layout whole --sync allreduce --seed 0 train.py",
        "run -n 4 --layout whole --sync server --servers 3 --seed 0 train.py",
    ]


def test_every_lane_has_the_limits_of_the_race(race: Race) -> None:
    limits = ("--stall", "60", "--grace", "90")
    assert race("-n", "2", "--sync", "allreduce", "--serial", *limits) == [
        "run -n 1 --layout whole --stall 60 --grace 90 --seed 0 train.py",
        "run -n 2 --sync allreduce --stall 60 --grace 90 --seed 0 train.py",
    ]


def test_every_lane_saves_in_its_own_folder(race: Race) -> None:
    saves = ("--checkpoint", "every=60s, keep=2")
    assert race("-n", "2", "--sync", "allreduce", *saves) == [
        "run -n 2 --sync allreduce --checkpoint every=1min,keep=2 --seed 0 train.py"
    ]
    shared = "every=10min,to=elsewhere"
    for given, environ in ((shared, {}), (None, {"FARANDOLE_CHECKPOINT": shared})):
        with pytest.raises(UserError, match="all lanes would save to elsewhere, and each would"):
            checked_policy(given, environ)
    assert checked_policy(None, {"FARANDOLE_CHECKPOINT": "every=10min"}) is None


@pytest.mark.parametrize(
    "typed",
    ["local:every=8", "server:async", "server:staleness=async", "allreduce:algorithm=auto"],
)
def test_a_lane_is_called_what_was_typed(race: Race, typed: str) -> None:
    """Also where a default is spelled out, or one of two ways to say the same."""
    assert race("-n", "2", "--sync", typed) == [f"run -n 2 --sync {typed} --seed 0 train.py"]
    assert RaceConfig(["train.py"], Path(), 0).lane(Entry(typed, 2)).name == typed


def test_without_layouts_the_script_keeps_its_own(race: Race) -> None:
    assert race("-n", "4", "--sync", "daso") == ["run -n 4 --sync daso --seed 0 train.py"]


GIVEN = ("--layout", "whole", "--layout")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((*GIVEN, "stage=2"), "Did you mean 'stages'?"),
        ((*GIVEN, "stages=3"), "lane stages=3: layout stages=3: one replica takes 3 workers"),
        (
            ("--sync", "allreduce", "--sync", "hogwild", "--pretend-hosts", "2"),
            "lane hogwild: hogwild ",
        ),
        (
            ("--sync", "allreduce", "--pretend-hosts", "5"),
            "--pretend-hosts 5: 4 workers sit on 1 to 4 hosts",
        ),
        (
            ("--sync", "allreduce", "--pretend-hosts", "2,1"),
            "that makes 3 workers, and there are 4",
        ),
        (("--sync", "allreduce", "--sync", "server:backups=4"), "leave nobody to wait for"),
        (
            (*GIVEN, "stages=2", "--sync", "server"),
            "lane stages=2 · server: server keeps one whole model for all workers",
        ),
        ((*GIVEN, "stages=2", "--sync", "hogwild"), "hogwild keeps one whole model"),
        (
            (*GIVEN, "stages=2,batchnorm=deferred", "--sync", "allreduce:batchnorm=sync"),
            "batchnorm=deferred moves them once a step",
        ),
        (("--sync", "allreduce", "--servers", "2"), "no strategy in this race needs"),
        (("--sync", "server", "--servers", "2", "--replicas", "2"), "--servers 3 or more"),
    ],
)
def test_a_later_lane_that_cannot_be_is_found_before_the_first(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    message: str,
) -> None:
    assert message in refused(tmp_path, monkeypatch, capsys, *options)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("FARANDOLE_TRANSPORT", "mpi", "FARANDOLE_TRANSPORT=mpi needs ranks that mpirun has"),
        ("FARANDOLE_TRANSPORT", "shmm", "Did you mean 'shm'?"),
        (
            "FARANDOLE_PRETEND_HOSTS",
            "2",
            "lane serial: --pretend-hosts 2: 1 workers sit on 1 to 1 hosts",
        ),
    ],
)
def test_what_the_environment_says_holds_for_every_lane(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    value: str,
    message: str,
) -> None:
    monkeypatch.setenv(name, value)
    options = ("--sync", "allreduce", "--serial")
    assert message in refused(tmp_path, monkeypatch, capsys, *options)


def test_hogwild_and_gpus() -> None:
    check_entries([Entry("hogwild", 2)], None, "cpu", {})
    with pytest.raises(UserError, match=r"lane hogwild: .*compute on cuda\. Hide the GPUs"):
        check_entries([Entry("allreduce", 2), Entry("hogwild", 2)], None, "cuda", {})


def refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *options: str,
) -> str:
    """What a race says that ends before its first lane."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    monkeypatch.setattr(sys, "argv", ["farandole", "race", "-n", "4", *options, "train.py"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    return capsys.readouterr().err


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
    lane = RaceConfig(["train.py"], tmp_path, 0).lane(entry)
    assert lane.name == name
    assert folder_name(7, lane) == folder


def test_a_long_list_of_cuts_is_no_long_name_of_a_folder(tmp_path: Path) -> None:
    cuts = "+".join(f"body.layer{number}" for number in range(40))
    lane = RaceConfig(["train.py"], tmp_path, 0).lane(
        Entry(None, 4, layout=f"stages=4,cuts={cuts}")
    )
    (tmp_path / folder_name(2, lane)).mkdir()
    assert len(folder_name(2, lane)) <= 100


def test_the_ranks_of_a_lane_are_told_its_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "says.py").write_text(SAYS_ITS_LAYOUT)
    config = RaceConfig(["says.py"], tmp_path / "runs", 0)
    for _ in run_lane(config, Entry(None, 2, layout="stages=2,microbatches=4"), 1):
        pass
    output = (tmp_path / "runs" / "1-stages-2-microbatches-4" / "output.log").read_text()
    for rank in (0, 1):
        assert f"[{rank}] layout stages=2,microbatches=4\n" in output

"""What is wrong with a host, by what it says of itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from farandole.errors import LaunchError, UserError
from farandole.launch.host_facts import HostFacts, JobFiles
from farandole.launch.probes.crowding import crowding
from farandole.launch.probes.host_check import compare, least_offset_seconds, marker
from farandole.launch.probes.problems import no_answer, require

FILES = JobFiles("/job", "train.py", ("key",), ("/runs/x/marker",))
HERE = HostFacts("3.11.2", "2.10.0+cpu", "0.1.0", 4, 0, clock_seconds=0.0, script="abc")


def problems(there: HostFacts, offset: float = 0.0) -> list[str]:
    return [f"{found.severity}: {found}" for found in compare("b", there, HERE, FILES, offset)]


def test_a_host_like_this_one() -> None:
    assert problems(HERE, 0.9) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"python": "3.12.2"}, "error: host b: it has Python 3.12.2, and this host has 3.11.2."),
        ({"python": "3.11.9"}, "warning: host b: it has Python 3.11.9, and this host has 3.11.2."),
        ({"torch": "2.11.0+cpu"}, "error: host b: it has torch 2.11.0+cpu, and this host has "),
        ({"torch": "2.10.0+cu130"}, "warning: host b: it has torch 2.10.0+cu130, and this host"),
        ({"torch": None}, "error: host b: torch is not installed there. pip install torch==2.10"),
        ({"farandole": "0.2.0"}, "error: host b: it has Farandole 0.2.0, and this host has 0.1.0."),
        ({"folder_exists": False}, "error: host b: there is no folder /job. Copy the job's files"),
        ({"script": None}, "error: host b: the script train.py is not there (in /job). Copy it"),
        ({"script": "def"}, "error: host b: the script train.py has another content there"),
        ({"missing": ("key",)}, "error: host b: there is no file key (from /job). Copy it there"),
        ({"missing": ("/runs/x/marker",)}, "error: host b: it does not see this host's folder "
         "/runs/x. Name a folder that all hosts share."),
        ({"no_way_back": "10.0.0.1:7: timed out"}, "error: host b: it cannot connect to this host "
         "at 10.0.0.1:7: timed out. Let it connect"),
    ],
)  # fmt: skip
def test_each_difference_is_named(changes: dict[str, object], message: str) -> None:
    (found,) = problems(replace(HERE, **changes))
    assert found.startswith(message)


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (1.5, "warning: host b: its clock is 1.5 s ahead of this host's."),
        (-3600.0, "error: host b: its clock is 60 minutes behind this host's. Set it, and keep "),
        (86400.0, "error: host b: its clock is 24.0 hours ahead of this host's."),
    ],
)
def test_clocks(offset: float, message: str) -> None:
    (found,) = problems(HERE, offset)
    assert found.startswith(message)


def test_a_script_that_is_not_here_is_not_compared() -> None:
    assert compare("b", HERE, replace(HERE, script=None), FILES, 0.0) == []


def test_how_far_a_clock_is_off_at_the_least() -> None:
    """Read between 100 and 102 of ours."""
    found = [least_offset_seconds(there, 100.0, 102.0) for there in (99.0, 100.5, 103.5)]
    assert found == [-1.0, 0.0, 1.5]


@pytest.mark.parametrize(
    ("code", "complaints", "message"),
    [
        (255, ["Permission denied (publickey)."], "host b: it cannot be reached by ssh: Permission "
         "denied (publickey). Try it."),
        (255, ["SOMEBODY", "", "Host key verification failed."], "host b: it cannot be reached by "
         "ssh: Host key verification failed. Try it.\n  SOMEBODY"),
        (127, ["env: no such file"], "host b: there is no Python at "),
        (1, [], "host b: Farandole does not start there: it said nothing (exit code 1). Install"),
    ],
)  # fmt: skip
def test_why_there_is_no_answer(code: int, complaints: list[str], message: str) -> None:
    assert str(no_answer("b", code, complaints, "ssh", "Try it.")).startswith(message)


def test_more_workers_than_a_host_has_room_for() -> None:
    assert crowding("b", 4, cores=4, gpus=0) == []
    (found,) = crowding("b", 5, cores=4, gpus=0)
    assert str(found) == "host b: 5 workers share 4 cores. Give it at most 4: b:4"
    (found,) = crowding("b", 2, cores=4, gpus=1)
    assert str(found) == "host b: 2 workers share 1 GPU. Give it at most 1: b:1"
    require([found])  # a warning stops nothing
    (found,) = crowding("b", 3, cores=2, gpus=0, option="-n ")
    assert str(found) == "host b: 3 workers share 2 cores. Give it at most 2: -n 2"


def test_all_errors_are_said_at_once() -> None:
    found = compare("b", replace(HERE, python="3.12.0", script=None), HERE, FILES, 0.0)
    with pytest.raises(LaunchError) as raised:
        require(found)
    lines = str(raised.value).splitlines()
    assert lines[0] == "the job was not started."
    assert [line.split(":")[0] for line in lines[1:]] == ["host b", "host b"]


def test_a_folder_that_cannot_have_a_marker(tmp_path: Path) -> None:
    with marker(tmp_path) as made:
        assert Path(made).is_file()
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="gone cannot be written to"), marker(tmp_path / "gone"):
        pass

"""What is wrong with a host, by what it says of itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import farandole
from farandole.errors import LaunchError, UserError
from farandole.launch.probes.host_check import (
    HostFacts,
    JobFiles,
    compare,
    crowding,
    facts_here,
    marker,
    require,
)

FILES = JobFiles("/job", "train.py", ("key",), ("/runs/x/marker",))
HERE = HostFacts("3.11.2", "2.10.0+cpu", "0.1.0", cores=4, gpus=0, script="abc")


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


def test_more_workers_than_a_host_has_room_for() -> None:
    assert crowding("b", 4, cores=4, gpus=0) == []
    (found,) = crowding("b", 5, cores=4, gpus=0)
    assert str(found) == "host b: 5 workers share 4 cores. Give it at most 4: b:4"
    (found,) = crowding("b", 2, cores=4, gpus=1)
    assert str(found) == "host b: 2 workers share 1 GPU. Give it at most 1: b:1"
    require([found])  # a warning stops nothing


def test_all_errors_are_said_at_once() -> None:
    found = compare("b", replace(HERE, python="3.12.0", script=None), HERE, FILES, 0.0)
    with pytest.raises(LaunchError) as raised:
        require(found)
    lines = str(raised.value).splitlines()
    assert lines[0] == "the job was not started."
    assert [line.split(":")[0] for line in lines[1:]] == ["host b", "host b"]


def test_the_facts_of_this_host(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("1")
    with marker(tmp_path) as shared:
        files = JobFiles(str(tmp_path), "train.py", ("key",), (shared,))
        facts = facts_here(files)
        assert HostFacts.from_json(facts.as_json()) == facts
    assert (facts.torch, facts.farandole) == (torch.__version__, farandole.__version__)
    assert facts.missing == ("key",)
    assert facts.cores >= 1
    (tmp_path / "train.py").write_text("2")
    again = facts_here(files)
    assert again.missing == ("key", shared)  # a marker is gone after its use
    assert None is not again.script != facts.script
    assert facts_here(JobFiles(str(tmp_path / "gone"), "train.py")).folder_exists is False
    with pytest.raises(UserError, match="gone cannot be written to"), marker(tmp_path / "gone"):
        pass


def test_a_host_of_another_version() -> None:
    with pytest.raises(LaunchError, match="describes itself in another way"):
        HostFacts.from_json({"python": "3.11.2"})

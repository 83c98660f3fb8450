"""Which hosts are refused, which are only named, and what is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from farandole.errors import LaunchError
from farandole.launch.backends.remote.facts_check import check_facts
from farandole.launch.host_facts import HostFacts, script_of

HERE = HostFacts("3.11.2", "2.13.0+cpu", "0.1.0", 8, None, 1000.0, "abc")
SCRIPT = Path("/there/train.py")


@pytest.mark.parametrize(
    ("difference", "message"),
    [
        ({"python": "3.12.1"}, r"host far has Python 3\.12, and .* has 3\.11\. Install the same"),
        ({"torch": "2.9.0+cpu"}, r"host far has torch 2\.9\.0, and .* pip install torch==2\.13\.0"),
        ({"torch": None}, r"host far has torch not installed, and .* has 2\.13\.0"),
        ({"farandole": "0.2.0"}, r"host far has Farandole 0\.2\.0, and .* has 0\.1\.0"),
        ({"script_digest": None}, r"train\.py is not on host far\. Copy it there"),
        ({"script_digest": "abd"}, r"train\.py is another file on host far\. Copy it there"),
        ({"clock_seconds": 4600.0}, r"clock of host far is 3600 s ahead of .* timedatectl"),
        ({"clock_seconds": -2600.0}, r"clock of host far is 3600 s behind .* timedatectl"),
    ],
)
def test_a_host_that_is_refused(difference: dict[str, object], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        check_facts("far", HERE, replace(HERE, **difference), SCRIPT)  # type: ignore[arg-type]


def test_a_host_that_is_only_named() -> None:
    (told,) = check_facts("far", HERE, replace(HERE, clock_seconds=1075.0), SCRIPT)
    assert "the clock of host far is 75 s ahead of" in told
    (told,) = check_facts("far", HERE, replace(HERE, torch="2.13.0+cu128"), SCRIPT)
    assert told == "host far has torch 2.13.0+cu128, another build than 2.13.0+cpu here"


def test_a_host_that_will_do() -> None:
    there = replace(HERE, python="3.11.9", cores=64, gpus=8, clock_seconds=1040.0)
    assert check_facts("far", HERE, there, SCRIPT) == []
    late = replace(HERE, clock_seconds=1075.0)
    assert check_facts("far", HERE, late, SCRIPT, within_seconds=30.0) == []
    module = replace(HERE, script_digest=None)  # `-m module`: nobody looked for a file
    assert check_facts("far", module, HERE, None) == []


def test_which_file_is_the_script() -> None:
    folder = Path("/there")
    assert script_of("/usr/bin/python3", ["train.py", "--lr", "1"], folder) == SCRIPT
    assert script_of("/usr/bin/python3", ["/other/train.py"], folder) == Path("/other/train.py")
    assert script_of("/usr/bin/python3", ["-m", "train"], folder) is None
    assert script_of("/bin/sh", ["train.sh"], folder) is None

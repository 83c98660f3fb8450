"""What the command line says to a script, and seeds of every size."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from farandole.errors import UserError
from farandole.sync import AllReduce
from farandole.train.randomness import seed_everything
from farandole.train.settings import Settings, default_name, pretended_hosts


def test_nothing_said() -> None:
    assert Settings.from_environ({}) == Settings()
    empty = dict.fromkeys(
        ["FARANDOLE_SYNC", "FARANDOLE_NAME", "FARANDOLE_RUNS", "FARANDOLE_SEED"], ""
    )
    assert Settings.from_environ(empty) == Settings()


def test_everything_said() -> None:
    said = {
        "FARANDOLE_SYNC": "allreduce:algorithm=ring",
        "FARANDOLE_NAME": "digits",
        "FARANDOLE_RUNS": "elsewhere/runs",
        "FARANDOLE_SEED": "-7",
        "FARANDOLE_SCRIPT": "examples/digits.py",
    }
    assert Settings.from_environ(said) == Settings(
        sync=AllReduce(algorithm="ring"),
        name="digits",
        folder=Path("elsewhere/runs"),
        seed=-7,
        script="examples/digits.py",
    )


def test_nonsense_is_named() -> None:
    with pytest.raises(UserError, match="FARANDOLE_SEED='x1'"):
        Settings.from_environ({"FARANDOLE_SEED": "x1"})
    with pytest.raises(UserError, match="no strategy 'none'"):
        Settings.from_environ({"FARANDOLE_SYNC": "none"})


@pytest.mark.parametrize(
    ("script", "stem"), [("examples/digits.py", "digits"), ("", "run"), ("-c", "-c")]
)
def test_a_run_is_named_after_its_script(script: str, stem: str) -> None:
    assert default_name(script).startswith(f"{stem}-20")


@pytest.mark.parametrize("seed", [0, -1, 2**31, 2**64, 10**30])
def test_any_whole_number_is_a_seed(seed: int) -> None:
    def draws() -> tuple[float, float, float]:
        seed_everything(seed)
        return random.random(), np.random.rand(), float(torch.rand(()))

    assert draws() == draws()


@pytest.mark.parametrize(
    ("text", "workers", "counts"),
    [("2", 4, [2, 2]), ("3", 4, [1, 1, 2]), ("1", 4, [4]), ("3,1", 4, [3, 1]), ("4", 4, [1] * 4)],
)
def test_hosts_can_be_declared(text: str, workers: int, counts: list[int]) -> None:
    hosts = pretended_hosts(text, workers).hosts
    assert [len(host.ranks) for host in hosts] == counts
    assert [rank for host in hosts for rank in host.ranks] == list(range(workers))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0", "1 to 4 hosts"),
        ("5", "1 to 4 hosts"),
        ("3,2", "that makes 5 workers, and there are 4"),
        ("4,0", "at least one"),
        ("two", "such as 2"),
    ],
)
def test_hosts_that_cannot_be(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        pretended_hosts(text, 4)

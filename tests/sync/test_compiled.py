"""A compiled model under every strategy: our hooks leave its graph whole, and the numbers right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Sandbox

SCRIPT = Path(__file__).parent / "scripts" / "compiled.py"
IN_STEP = (
    "allreduce",
    "allreduce:batchnorm=sync",
    "allreduce:codec=int8",
    "lagged",
    "local:every=2",
    "postlocal:at=0.3",
    "adacomm:start=2,steps=3",
    "diloco:every=2",
    "federated",
    "server:bsp",
)
BY_CHANCE = ("downpour", "hogwild")  # who comes first differs from run to run


def outcomes(sandbox: Sandbox, *arguments: str) -> dict[str, list[Any]]:
    done = sandbox.farandole("run", "-n", "2", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.removeprefix("[0] ") for line in done.stdout.splitlines()]
    rows = [json.loads(line) for line in lines if line.startswith('["')]
    return {name: row for name, *row in rows}


def test_graphs_stay_whole(sandbox: Sandbox) -> None:
    found = outcomes(sandbox, str(SCRIPT), *IN_STEP, *BY_CHANCE)
    assert list(found) == [*IN_STEP, *BY_CHANCE]
    for name, (breaks, graphs, apart) in found.items():
        if name == "allreduce:batchnorm=sync":  # ranks talk to each other in the middle of it
            assert breaks > 0
        else:
            assert (breaks, graphs) == (0, 1), name
        if name in IN_STEP:
            assert apart == pytest.approx(0, abs=1e-9), name


def test_graphs_stay_whole_under_daso(sandbox: Sandbox) -> None:
    found = outcomes(sandbox, "--pretend-hosts", "2", str(SCRIPT), "daso")
    assert found["daso"][:2] == [0, 1]

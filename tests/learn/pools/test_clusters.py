"""Ray, Dask, and mpi4py's pool under mpirun: the same bits, also when workers die."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Sandbox

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.mark.needs("ray")
@pytest.mark.usefixtures("only_ray")
def test_ray(sandbox: Sandbox) -> None:
    known = {"RAY_TMPDIR": str(sandbox.temporary), "RAY_USAGE_STATS_ENABLED": "0"}
    done = sandbox.python(SCRIPTS / "on_ray.py", **known)
    ours = [line for line in done.stdout.splitlines() if "(raylet)" not in line]
    assert ours == [
        "the same bits: True",
        "with a worker killed: True, 1 lost",
        "ZeroDivisionError: in chunk 37",
    ], done.stderr
    sandbox.wait_until_gone()


@pytest.mark.needs("distributed")
def test_dask(sandbox: Sandbox) -> None:
    # So often Dask drops copies, of which the worker that is killed may hold the last one.
    often = {"DASK_DISTRIBUTED__SCHEDULER__ACTIVE_MEMORY_MANAGER__INTERVAL": "5ms"}
    done = sandbox.python(SCRIPTS / "on_dask.py", **often)
    assert done.stdout.splitlines() == [
        "the same bits: True",
        "with a worker killed: True, 1 lost",
        "ZeroDivisionError: in chunk 37",
        "by address: True",
    ], done.stderr
    sandbox.wait_until_gone()


@pytest.mark.mpi
@pytest.mark.needs("mpi4py")
def test_mpi4py_futures(sandbox: Sandbox, mpirun: list[str]) -> None:
    command = [*mpirun, "-n", "3", sys.executable, "-m", "mpi4py.futures"]
    done = sandbox.run([*command, SCRIPTS / "on_mpi.py"])
    assert done.stdout.splitlines() == [
        "the same bits: True",
        "ZeroDivisionError: in chunk 37",
    ], done.stderr

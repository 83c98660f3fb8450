"""How MPI starts and ends. That it carries what it should: test_conformance.py, test_faults.py."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from farandole.comm.transports import mpi_world
from farandole.errors import UserError

if TYPE_CHECKING:
    from conftest import Sandbox

ENDS = Path(__file__).parents[1] / "scripts" / "mpi_ends.py"


def test_without_mpi4py_one_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(UserError, match=r"pip install 'farandole\[mpi\]'"):
        mpi_world.mpi_world(timedelta(seconds=60))


def test_without_mpi_one_is_told_what_to_install(sandbox: Sandbox) -> None:
    """mpi4py installs without an MPI library, and finds out when it is imported."""
    code = (
        "from datetime import timedelta; from farandole.comm.transports.mpi_world import mpi_world;"
        "mpi_world(timedelta(seconds=60))"
    )
    done = sandbox.fork(sandbox.script("code.py", code), MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert "UserError: the MPI transport needs mpi4py and an MPI library" in done.stderr
    assert "apt install openmpi-bin" in done.stderr


def test_open_mpi_is_kept_off_the_network_when_it_needs_none() -> None:
    several_hosts = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    environ = dict(several_hosts)
    mpi_world._stay_on_this_host(environ)
    assert environ == several_hosts
    environ |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_MCA_pml": "ob1"}
    mpi_world._stay_on_this_host(environ)
    assert environ["OMPI_MCA_btl"].startswith("^tcp")
    assert environ["OMPI_MCA_pml"] == "ob1", "what the user has chosen stays"


@pytest.mark.mpi
@pytest.mark.needs("mpi4py")
def test_a_rank_that_raises_ends_the_job(sandbox: Sandbox, mpirun: list[str]) -> None:
    """At once: by itself it would sit in MPI_Finalize, and the others in the barrier, for 60 s."""
    done = sandbox.run([*mpirun, "-n", "2", sys.executable, ENDS, "raise"])
    assert done.returncode == 1
    assert "KeyError: 'lost on rank one'" in done.stderr
    assert "did not answer" not in done.stderr
    assert ": 0-1" in done.stdout, "both ranks are on one host, and MPI told which"
    sandbox.wait_until_gone()


@pytest.mark.mpi
@pytest.mark.needs("mpi4py")
def test_a_rank_that_never_comes_is_not_waited_for_forever(
    sandbox: Sandbox, mpirun: list[str]
) -> None:
    done = sandbox.run([*mpirun, "-n", "2", sys.executable, ENDS, "never"])
    assert done.returncode == 1
    assert "Timeout (0:00:02)!" in done.stderr
    assert "in wait_for_all_ranks" in done.stderr, "the traceback says what was waited for"
    sandbox.wait_until_gone()

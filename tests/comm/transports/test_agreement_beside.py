"""Claims that are compared while NCCL is at work already."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import Sandbox

SCRIPT = Path(__file__).parents[1] / "scripts" / "agreement_beside.py"


def test_ranks_that_differ_are_found_before_the_call_returns(sandbox: Sandbox) -> None:
    done = sandbox.fork(SCRIPT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "claims were compared beside" in done.stdout

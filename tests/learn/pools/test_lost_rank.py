"""Ranks of a run with parameter servers as a pool: one that dies is named on all others."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import Sandbox

SCRIPT = Path(__file__).parent / "scripts" / "lost_rank.py"


def test_a_rank_that_dies_is_named(sandbox: Sandbox) -> None:
    job = ("-n", "3", "--servers", "1", "--sync", "server")
    done = sandbox.farandole("run", *job, SCRIPT)
    assert done.returncode == 0, done.stderr
    wanted = "in pass 2 over X, rank 2 of the run was lost, and with it chunks 4 to 5. Start the"
    for rank in (0, 1):
        assert f"rank {rank}: {wanted}" in done.stdout

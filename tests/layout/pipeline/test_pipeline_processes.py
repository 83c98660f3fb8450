"""Pipelines between real processes: three ranks, once, and what they found; then one is killed."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import Sandbox

SCRIPT = Path(__file__).parents[1] / "scripts" / "pipe_facts.py"


def test_three_real_processes(sandbox: Sandbox, free_port: str, tmp_path: Path) -> None:
    common = {"WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": free_port}
    ranks = [common | {"RANK": str(rank)} for rank in range(3)]
    done = sandbox.by_hand(ranks, SCRIPT, tmp_path)
    assert done[1].returncode == -signal.SIGKILL, done[1].stderr
    for rank in (0, 2):
        assert done[rank].returncode == 0, done[rank].stderr
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(found["errors"]) == 5
        assert max(found["errors"].values()) < 1e-10
        assert len(found["dropout"]) == 3
        assert max(found["dropout"].values()) < 1e-10
        assert found["wide"] < 1e-10
        assert (found["bytes_sent"] > 7 * 90_000 * 8) == (rank == 0)
        assert found["death"] == "rank 1 (stage 1) has ended."

"""Tiles on four real processes, through memory and over sockets; then one of them is killed."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Sandbox

SCRIPT = Path(__file__).parents[1] / "scripts" / "tile_facts.py"


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_four_real_processes(
    sandbox: Sandbox, free_port: str, tmp_path: Path, transport: str
) -> None:
    common = {"WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": free_port}
    common["FARANDOLE_TRANSPORT"] = transport
    ranks = [common | {"RANK": str(rank)} for rank in range(4)]
    done = sandbox.by_hand(ranks, SCRIPT, tmp_path)
    assert done[1].returncode == -signal.SIGKILL, done[1].stderr
    for rank in (0, 2, 3):
        assert done[rank].returncode == 0, done[rank].stderr
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(found["errors"]) == 5
        assert max(found["errors"].values()) < 1e-10, found["errors"]
        assert found["bytes_sent"] > 0
        assert found["death"].startswith("rank 1 (stage 0) "), found["death"]

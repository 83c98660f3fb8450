"""Averages of gradients on GPUs keep the order of collectives, and their errors name ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import Sandbox

SCRIPT = Path(__file__).parent / "scripts" / "device_averages.py"


def test_order_and_lost_ranks(sandbox: Sandbox) -> None:
    done = sandbox.fork(SCRIPT)
    assert done.returncode == 0, done.stdout + done.stderr

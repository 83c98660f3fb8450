"""Shared memory in real jobs: used by itself, never left behind, and done without where it must."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Sandbox

SCRIPT = Path(__file__).parent / "scripts" / "train_shared.py"


def facts(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def in_dev_shm() -> set[str]:
    return {entry.name for entry in Path("/dev/shm").iterdir() if entry.name.startswith("torch_")}


def test_gradients_are_shared_and_nothing_outlives_the_death_of_all(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    before = in_dev_shm()
    done = sandbox.farandole("run", "-n", "2", SCRIPT, tmp_path, "die")
    assert done.returncode == 128 + signal.SIGKILL
    for found in facts(tmp_path):
        assert found == {"transport": "shm", "shared": True, "in_step": True, "memory": True}
    assert in_dev_shm() == before  # the rest has no name at all


def test_asked_to_do_without(sandbox: Sandbox, tmp_path: Path) -> None:
    done = sandbox.farandole("run", "-n", "2", "--transport", "c10d", SCRIPT, tmp_path, "end")
    assert done.returncode == 0, done.stderr
    for found in facts(tmp_path):
        assert found == {"transport": "c10d", "shared": False, "in_step": True, "memory": False}


def under(prefix: str, sandbox: Sandbox, folder: Path) -> subprocess.CompletedProcess[str]:
    """The job in a shell that has taken something away first."""
    starter = sandbox.script(
        "starter.py",
        f"""
import subprocess, sys
command = [sys.executable, "-m", "farandole", "run", "-n", "2", {str(SCRIPT)!r}, *sys.argv[1:]]
sys.exit(subprocess.run(["sh", "-c", {prefix!r} + ' exec "$@"', "sh", *command]).returncode)
""",
    )
    return sandbox.python(starter, folder, "end")


def test_no_room_for_a_segment_is_one_warning_and_gloo(sandbox: Sandbox, tmp_path: Path) -> None:
    done = under("ulimit -f 500;", sandbox, tmp_path)
    assert done.returncode == 0, done.stderr
    assert [found["transport"] for found in facts(tmp_path)] == ["c10d", "c10d"]
    assert all(found["in_step"] for found in facts(tmp_path))
    assert done.stderr.count("UserWarning") == 1
    assert "File too large" in done.stderr
    assert "lift `ulimit -f`" in done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount")
def test_a_small_dev_shm_is_one_warning_and_one_more_copy(sandbox: Sandbox, tmp_path: Path) -> None:
    small = "unshare -m sh -c 'mount -t tmpfs -o size=4m none /dev/shm; exec \"$@\"' sh"
    starter = under(f'set -- {small} "$@";', sandbox, tmp_path)
    assert starter.returncode == 0, starter.stderr
    for found in facts(tmp_path):
        assert found == {"transport": "shm", "shared": False, "in_step": True, "memory": True}
    assert starter.stderr.count("UserWarning") == 1
    assert "docker run --shm-size" in starter.stderr

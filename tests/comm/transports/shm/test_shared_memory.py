"""Shared memory in real jobs: used by itself, never left behind, and done without where it must."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

if TYPE_CHECKING:
    from conftest import Sandbox

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_shared.py"
LATE_WRITER = SCRIPT.with_name("late_writer.py")
BESIDE_GPUS = SCRIPT.with_name("beside_gpus.py")


def facts(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def left_in_dev_shm() -> set[str]:
    """Segments of processes that have ended; torch calls them torch_<process id>_…"""
    names = [entry.name for entry in Path("/dev/shm").iterdir() if entry.name.startswith("torch_")]
    return {name for name in names if not psutil.pid_exists(int(name.split("_")[1]))}


def test_gradients_are_shared_and_nothing_outlives_the_death_of_all(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    before = left_in_dev_shm()
    done = sandbox.farandole("run", "-n", "2", SCRIPT, tmp_path, "die")
    assert done.returncode == 128 + signal.SIGKILL
    for found in facts(tmp_path):
        assert found == {"transport": "shm", "shared": True, "in_step": True, "memory": True}
    # The rest has no name at all. Another test may be about to remove its own.
    sandbox.wait_until(lambda: left_in_dev_shm() <= before, "no segment is left")


Under = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def under(sandbox: Sandbox, two_ranks: list[dict[str, str]], tmp_path: Path) -> Under:
    """Runs the job where a command, or variables, have changed something; both ends as one."""

    def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        ranks = [rank | variables for rank in two_ranks]
        ends = sandbox.by_hand(ranks, SCRIPT, tmp_path, "end", under=command)
        code = max(abs(end.returncode) for end in ends)
        return subprocess.CompletedProcess(command, code, "", "".join(end.stderr for end in ends))

    return run


def test_asked_to_do_without(under: Under, tmp_path: Path) -> None:
    done = under(FARANDOLE_TRANSPORT="c10d")
    assert done.returncode == 0, done.stderr
    for found in facts(tmp_path):
        assert found == {"transport": "c10d", "shared": False, "in_step": True, "memory": False}


def test_no_room_for_a_segment_is_one_warning_and_gloo(under: Under, tmp_path: Path) -> None:
    done = under("sh", "-c", 'ulimit -f 500; exec "$@"', "sh")
    assert done.returncode == 0, done.stderr
    assert [found["transport"] for found in facts(tmp_path)] == ["c10d", "c10d"]
    assert all(found["in_step"] for found in facts(tmp_path))
    assert done.stderr.count("UserWarning") == 1
    assert "File too large" in done.stderr
    assert "lift `ulimit -f`" in done.stderr


def test_a_small_dev_shm_is_one_warning_and_one_more_copy(under: Under, tmp_path: Path) -> None:
    try:
        subprocess.run(["unshare", "-m", "true"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:  # nor may root, in some containers
        pytest.skip(f"no mount namespace can be made here: {error}")
    small = 'mount -t tmpfs -o size=4m none /dev/shm; exec "$@"'
    done = under("unshare", "-m", "sh", "-c", small, "sh")
    assert done.returncode == 0, done.stderr
    for found in facts(tmp_path):
        assert found == {"transport": "shm", "shared": False, "in_step": True, "memory": True}
    assert done.stderr.count("UserWarning") == 1
    assert "docker run --shm-size" in done.stderr


def test_who_gives_up_is_not_written_to_afterwards(sandbox: Sandbox, tmp_path: Path) -> None:
    done = sandbox.fork(LATE_WRITER, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.splitlines()
    assert "rank 0: all_reduce failed on rank 0 of 2" in said
    assert (
        "rank 0 cannot share memory: its memory was shared before, by a group that has failed since"
        in said
    )


def test_cpu_tensors_share_memory_beside_gpus(sandbox: Sandbox) -> None:
    done = sandbox.fork(BESIDE_GPUS)
    assert done.returncode == 0, done.stdout + done.stderr
    shared, asked = done.stdout.splitlines()
    assert shared == "auto shm True []"
    words = asked.split(" ", 3)
    assert words[:3] == ["c10d", "c10d", "False"]
    assert words[3].startswith("[4096, "), "gloo's own is a candidate"

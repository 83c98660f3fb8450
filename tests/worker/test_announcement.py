"""Ranks of one host without a launcher's store: rank 0 announces its own in a private folder."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch

from farandole.errors import JoinError
from farandole.worker.environment import RankAssignment
from farandole.worker.join import join

RANK_1 = RankAssignment("openmpi", rank=1, size=2, local_rank=1, local_size=2, job="17")
STALE = "stale.socket"  # nobody listens there


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the file goes, before anyone has made it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(variable, "lo")  # `join` sets them; put back after the test
    return tmp_path / f"farandole-{os.getuid()}"


def join_as(assignment: RankAssignment, seconds: float = 0.2) -> None:
    join(assignment, torch.device("cpu"), ranks_per_gpu=1, timeout=timedelta(seconds=seconds))


def announcement(folder: Path) -> Path:
    """Its name, as the error of a rank that waits for it gives it."""
    with pytest.raises(JoinError) as error:
        join_as(RANK_1, seconds=0.01)
    (name,) = [word.rstrip(".") for word in str(error.value).split() if str(folder) in word]
    return Path(name)


def ended_process() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_rank_that_waits_in_vain_names_rank_0(folder: Path) -> None:
    with pytest.raises(JoinError, match=r"rank 1 waited 0\.2 s for rank 0 to announce itself"):
        join_as(RANK_1)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[9]", '{"socket": "a"}', '{"socket": "a", "pid": "x"}'])
def test_a_damaged_file_is_not_believed(folder: Path, text: str) -> None:
    announcement(folder).write_text(text)
    with pytest.raises(JoinError, match="for rank 0 to announce itself"):
        join_as(RANK_1)


def test_what_a_crashed_job_left_is_not_believed(folder: Path) -> None:
    own = psutil.Process()
    path = announcement(folder)
    for left in (
        {"socket": STALE, "pid": ended_process(), "started": own.create_time()},
        # Another process has that id by now.
        {"socket": STALE, "pid": own.pid, "started": own.create_time() - 3600},
    ):
        path.write_text(json.dumps(left))
        with pytest.raises(JoinError, match="for rank 0 to announce itself"):
            join_as(RANK_1)


def test_a_living_rank_0_is_believed(folder: Path) -> None:
    own = psutil.Process()
    content = {"socket": STALE, "pid": own.pid, "started": own.create_time()}
    announcement(folder).write_text(json.dumps(content))
    with pytest.raises(JoinError, match=f"no store answers at {folder}/{STALE}"):
        join_as(RANK_1)


def test_rank_0_takes_its_file_away_also_when_nobody_comes(folder: Path) -> None:
    rank_0 = RankAssignment("openmpi", rank=0, size=2, local_rank=0, local_size=2, job="17")
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(folder / STALE))
    with pytest.raises(JoinError, match=r"rank 0 waited 0\.2 s for rank\(s\) \[1\] of 2"):
        join_as(rank_0)
    (left,) = folder.iterdir()  # until this process ends
    assert left.suffix == ".socket"
    assert left.name != STALE, "what a killed job has left goes"
    assert left.stat().st_mode & 0o777 == 0o600


def test_two_jobs_have_two_files(folder: Path) -> None:
    names = set()
    for assignment in (RANK_1, replace(RANK_1, job="18"), replace(RANK_1, launcher="mpich")):
        with pytest.raises(JoinError) as error:
            join_as(assignment, seconds=0.01)
        names.add(str(error.value))
    assert len(names) == 3


@pytest.mark.parametrize("mode", [0o770, 0o705])
def test_a_folder_that_others_can_enter_is_refused(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(JoinError, match=f"{folder} is not a private folder of this user"):
        join_as(RANK_1)


def test_a_link_to_elsewhere_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(JoinError, match="is not a private folder of this user"):
        join_as(RANK_1)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_somebody_else_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)
    with pytest.raises(JoinError, match="is not a private folder of this user"):
        join_as(RANK_1)


def test_without_a_port_several_hosts_cannot_meet() -> None:
    with pytest.raises(JoinError, match="Set MASTER_ADDR and MASTER_PORT"):
        join_as(RankAssignment("openmpi", rank=1, size=2, local_rank=0, local_size=1, job="17"))


def test_a_port_that_is_taken_is_named(folder: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assignment = RankAssignment("torchrun", 0, 2, 0, 1, address="localhost", port=port)
        with pytest.raises(JoinError, match=f"rank 0 cannot listen at localhost:{port}"):
            join_as(assignment)

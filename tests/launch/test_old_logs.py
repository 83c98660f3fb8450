"""Logs of failed jobs stay for a week; those of others, and of jobs that run, stay."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from farandole.launch.job import Job
from farandole.launch.job_directory import JobDirectory
from farandole.launch.old_logs import LOGS, remove_old_folders
from farandole.system import owned_folders
from farandole.system.owned_folders import SOCKETS, OwnedFolder, folder_for_sockets

WEEK = 7 * 86400.0


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short path: beside a long one, /tmp is looked at too."""
    with tempfile.TemporaryDirectory(prefix="fd-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def age(folder: Path, seconds: float) -> None:
    for path in (*folder.iterdir(), folder):
        os.utime(path, (time.time() - seconds,) * 2)


def kept_logs() -> Path:
    logs = OwnedFolder(LOGS)
    (logs.path / "rank-0.out").write_text("loss 0.5\n")
    logs.close(keep=True)
    return logs.path


def test_only_what_is_older_than_a_week_goes(temporary: Path) -> None:
    old, young = kept_logs(), kept_logs()
    age(old, WEEK + 60)
    age(young, WEEK - 60)
    assert remove_old_folders() == [old]
    assert not old.exists()
    assert (young / "rank-0.out").read_text() == "loss 0.5\n"


def test_a_folder_that_is_still_written_to_is_not_old(temporary: Path) -> None:
    logs = kept_logs()
    age(logs, 2 * WEEK)
    os.utime(logs / "rank-0.out")
    assert remove_old_folders() == []


def test_a_job_that_lives_keeps_its_folder_however_quiet_it_is(temporary: Path) -> None:
    logs = OwnedFolder(LOGS)
    age(logs.path, 2 * WEEK)
    assert remove_old_folders() == []
    logs.close(keep=True)
    age(logs.path, 2 * WEEK)
    assert remove_old_folders() == [logs.path]


def test_sockets_that_a_killed_job_left_where_paths_are_short(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = temporary / ("x" * 60)
    short = temporary / "short"
    for folder in (deep, short):
        folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    monkeypatch.setattr(owned_folders, "_SHORT", short)
    assert folder_for_sockets() == short
    alive = OwnedFolder(SOCKETS, parent=short)
    left = OwnedFolder(SOCKETS, parent=short)
    fcntl.flock(left._lock, fcntl.LOCK_UN)  # as the kernel does when its owner is killed
    assert remove_old_folders() == [left.path]
    assert alive.path.exists()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    assert folder_for_sockets() == temporary


def test_what_is_not_ours_is_left_alone(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = temporary / "somebodys"
    target.mkdir()
    (temporary / "farandole-logs-link").symlink_to(target)
    (temporary / "farandole-logs-file").touch()
    os.utime(temporary / "farandole-logs-file", (0, 0))
    theirs = kept_logs()
    age(theirs, 2 * WEEK)
    age(target, 2 * WEEK)
    monkeypatch.setattr(os, "getuid", lambda: theirs.stat().st_uid + 1)
    assert remove_old_folders() == []
    monkeypatch.undo()
    assert remove_old_folders(temporary) == [theirs]
    assert target.exists()


def test_the_next_job_removes_them(temporary: Path) -> None:
    old = kept_logs()
    age(old, WEEK + 60)
    place = JobDirectory(Job(1, ("train.py",)))
    assert not old.exists()
    place.close(keep_logs=False)
    assert list(temporary.iterdir()) == []

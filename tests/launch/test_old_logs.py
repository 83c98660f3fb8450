"""Logs of failed jobs stay for a week; those of others, and of jobs that run, stay."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest

from farandole.launch.job import Job
from farandole.launch.job_directory import JobDirectory
from farandole.launch.old_logs import LOGS, remove_old_folders
from farandole.system.owned_folders import OwnedFolder

WEEK = 7 * 86400.0


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


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

"""The record of a run's failures: what counts as one, and what is made of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from farandole.train.checkpoint.automatic.attempts import ASSUMED_SECONDS, NAME, Attempts
from farandole.worker.marker_files import INTERRUPTED


def record(folder: Path, *attempts: tuple[float, bool]) -> None:
    items = [{"seconds": seconds, "failed": failed} for seconds, failed in attempts]
    (folder / NAME).write_text(json.dumps({"attempts": items}))


def test_without_a_record_something_is_assumed(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path)
    assert attempts.mtbf_seconds == pytest.approx(ASSUMED_SECONDS, rel=1e-3)
    assert "no failure is recorded, one in 24 h is assumed" in attempts.evidence
    attempts.end()


def test_failures_shorten_it_and_orderly_ends_do_not(tmp_path: Path) -> None:
    record(tmp_path, (3600.0, True), (7200.0, True), (3600.0, False))
    attempts = Attempts(tmp_path)
    assert attempts.mtbf_seconds == pytest.approx((ASSUMED_SECONDS + 4 * 3600) / 3, rel=1e-3)
    assert f"{tmp_path / NAME} records 2 failures in 4 h" in attempts.evidence
    attempts.end()


def test_an_attempt_that_never_ends_has_failed(tmp_path: Path) -> None:
    killed = Attempts(tmp_path)
    killed.progress()  # and no more
    sys.excepthook = killed._show  # as in a process that is gone
    after = Attempts(tmp_path)
    assert "1 failure" in after.evidence
    after.end()
    last = Attempts(tmp_path)
    assert "1 failure in" in last.evidence
    last.end()
    ends = json.loads((tmp_path / NAME).read_text())["attempts"]
    assert [attempt["failed"] for attempt in ends] == [True, False, False]


def test_an_exception_is_a_failure_and_ctrl_c_is_not(tmp_path: Path) -> None:
    for kind in (ValueError, KeyboardInterrupt):
        attempts = Attempts(tmp_path)
        sys.excepthook(kind, kind("on purpose"), None)
        attempts.end()
    ends = json.loads((tmp_path / NAME).read_text())["attempts"]
    assert [attempt["failed"] for attempt in ends] == [True, False]


def test_a_job_that_the_user_has_stopped(tmp_path: Path) -> None:
    """By Ctrl-C on the launcher, which ends the workers by SIGTERM."""
    record(tmp_path, (3600.0, True), (60.0, True))
    (tmp_path / INTERRUPTED).touch()
    for _ in range(2):
        attempts = Attempts(tmp_path)
        assert "records 1 failure in" in attempts.evidence
        attempts.end()
    assert not (tmp_path / INTERRUPTED).exists()


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"attempts": 3}', '{"attempts": [{"seconds": -1, "failed": true}]}', "\xff"],
)
def test_a_damaged_record_is_no_record(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text, encoding="latin-1")
    attempts = Attempts(tmp_path)
    assert "no failure is recorded" in attempts.evidence
    attempts.end()
    assert len(json.loads((tmp_path / NAME).read_text())["attempts"]) == 1


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    attempts = Attempts(tmp_path / "file")
    attempts.progress()
    attempts.end()

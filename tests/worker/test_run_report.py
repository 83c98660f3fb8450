"""What a run tells its launcher, and what the launcher makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from farandole.environment import ATTEMPT
from farandole.worker.run_report import KEY, RunReport, read_report
from farandole.worker.run_reporter import run_reporter
from farandole.worker.store.job_store import JobStore

EARLIER = RunReport("x", 9, 1, "checkpoints/000001", 8, 1, resumes=True)


def test_a_run_reports_where_it_saves_and_whether_it_looks_there(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    try:
        variables = store.here().variables()
        assert run_reporter("x", variables) is None  # the job is not started again
        reporter = run_reporter("x", {**variables, ATTEMPT: "0"})
        assert reporter is not None
        assert read_report(store.value(KEY)) == RunReport("x")
        reporter.has_checkpoint("", "checkpoints/000000", 4, 0)
        reporter.progress(5, 0)  # not a second later: it is not written
        reported = RunReport("x", 4, 0, "checkpoints/000000", 4, 0, resumes=False)
        assert read_report(store.value(KEY)) == reported
        reporter.looked("")
        reporter.has_checkpoint("", "checkpoints/000001", 8, 1)
        found = read_report(store.value(KEY))
        assert found is not None
        assert (found.checkpoint, found.steps, found.resumes) == ("checkpoints/000001", 8, True)
        reporter.has_checkpoint("elsewhere", "elsewhere/000000", 9, 1)
        found = read_report(store.value(KEY))
        assert found is not None
        assert not found.resumes
    finally:
        store.close()
    reporter.has_checkpoint("", "checkpoints/000002", 12, 1)  # the launcher is gone: no error


@pytest.mark.parametrize(
    "text", [None, b"", b"[]", b"{}", b"\xff", json.dumps({"name": "x"}).encode()]
)
def test_what_is_no_report_is_none(text: bytes | None) -> None:
    assert read_report(text) is None


def test_what_a_later_start_has_not_come_to_yet_holds() -> None:
    assert RunReport("x").after(EARLIER) == RunReport("x", 0, 0, "checkpoints/000001", 8, 1, True)
    further = RunReport("x", 20, 2, "checkpoints/000002", 16, 2)
    assert further.after(EARLIER).checkpoint == "checkpoints/000002"
    assert further.has_got_further(EARLIER)
    assert not EARLIER.has_got_further(EARLIER)
    assert not RunReport("x").after(EARLIER).has_got_further(EARLIER)
    assert EARLIER.has_got_further(None)

"""Which failure is the cause, from what the workers leave behind."""

from __future__ import annotations

import itertools
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from farandole.errors import CommError, JoinError
from farandole.worker.failure import (
    Failure,
    Kind,
    first_cause,
    read_failure,
    record_leaving,
    record_uncaught,
)

SECOND = 10**9
RAISED = Failure(1, 1, "ValueError: the first to fail", 100 * SECOND)
FOLLOWED = Failure(0, 1, "CommError: peer closed", 99 * SECOND, Kind.FOLLOWED, is_dated=True)
TOLD_TO_STOP = Failure(2, -signal.SIGTERM, "", 81 * SECOND).told_to_stop(101 * SECOND)


@pytest.fixture
def variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # put back after the test
    at_sigterm = signal.getsignal(signal.SIGTERM)
    error_file = tmp_path / "rank-1.error.json"
    yield {"TORCHELASTIC_ERROR_FILE": str(error_file), "FARANDOLE_JOB": "c0de"}
    signal.signal(signal.SIGTERM, at_sigterm)


def raise_here(error: BaseException) -> None:
    """What the interpreter does with an exception that nobody catches."""
    try:
        raise error
    except BaseException as caught:
        sys.excepthook(type(caught), caught, caught.__traceback__)


def read(variables: dict[str, str], exit_code: int, noticed_seconds: int = 0) -> Failure:
    error_file = Path(variables["TORCHELASTIC_ERROR_FILE"])
    return read_failure(1, exit_code, noticed_seconds, error_file, error_file.with_name("err"))


def test_the_earliest_is_the_cause_in_whatever_order() -> None:
    for failures in itertools.permutations([RAISED, FOLLOWED, TOLD_TO_STOP]):
        assert first_cause(failures) == RAISED


def test_who_was_killed_is_the_cause_unless_the_launcher_did_it(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    for number in (signal.SIGKILL, signal.SIGTERM):
        killed = read_failure(3, -number, 130, nothing, nothing)  # noticed much later
        assert first_cause([FOLLOWED, killed]) == killed
        assert first_cause([killed.told_to_stop(101 * SECOND), FOLLOWED]) == FOLLOWED


def test_who_was_leaving_before_it_was_told_to_stop_has_left_by_itself() -> None:
    left = Failure(2, 3, "", 99 * SECOND, is_dated=True)
    assert left.told_to_stop(100 * SECOND) == left
    assert left.told_to_stop(98 * SECOND).kind is Kind.STOPPED


def test_who_held_up_the_others_is_the_cause_unless_one_failed_by_itself() -> None:
    held_up = Failure(2, -9, "", 102 * SECOND).held_up_others("was stopped")
    assert first_cause([FOLLOWED, held_up, TOLD_TO_STOP]) == held_up
    assert first_cause([held_up, RAISED]) == RAISED
    assert str(held_up) == "rank 2 was stopped, and was ended"
    assert Failure(2, 0, "", 0).held_up_others("still ran").exit_code == -signal.SIGTERM


def test_of_several_at_the_same_time_the_one_noticed_first() -> None:
    left = Failure(2, 3, "", 99 * SECOND)
    assert first_cause([left, Failure(0, 4, "", 99 * SECOND)]) == left


def test_of_several_at_the_same_time_the_one_that_was_killed() -> None:
    killed = Failure(2, -signal.SIGTERM, "", 99 * SECOND)
    assert first_cause([Failure(0, 1, "gloo: closed", 99 * SECOND), killed]) == killed


@pytest.mark.parametrize("chained", ["cause", "context", "itself", "not"])
def test_an_error_says_whether_a_lost_peer_led_to_it(
    variables: dict[str, str], chained: str
) -> None:
    record_uncaught(variables)
    lost = CommError("rank 1 was lost")
    error = lost if chained == "itself" else RuntimeError("one that follows")
    if chained == "cause":
        error.__cause__ = lost
    if chained == "context":
        error.__context__ = JoinError("rank 1 did not arrive")
        error.__suppress_context__ = True
    raise_here(error)
    assert read(variables, 1).kind is (Kind.OWN if chained == "not" else Kind.FOLLOWED)


def test_signals_have_names() -> None:
    assert Failure(0, -9, "", 0).killed_by == "SIGKILL"
    assert Failure(0, -40, "", 0).killed_by == "signal 40"
    assert Failure(0, 1, "", 0).killed_by is None


def test_an_uncaught_exception_reaches_the_launcher(
    variables: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    record_uncaught(variables)
    raise_here(ValueError("lost"))
    failure = read(variables, exit_code=1)
    assert failure.error.startswith("Traceback")
    assert failure.error.endswith("ValueError: lost\n")
    assert "ValueError: lost" in capsys.readouterr().err  # and is shown as ever
    assert failure.time_ns > 10**18
    assert read(variables, exit_code=-signal.SIGTERM).exit_code == 1  # it was leaving with 1


def test_who_was_interrupted_has_ended_by_the_signal(variables: dict[str, str]) -> None:
    record_uncaught(variables)
    raise_here(KeyboardInterrupt())
    for exit_code in (-signal.SIGINT, -signal.SIGTERM):  # by itself, or hurried by the launcher
        assert read(variables, exit_code).killed_by == "SIGINT"


def test_torchs_own_reader_accepts_the_file(variables: dict[str, str]) -> None:
    record_uncaught(variables)
    raise_here(ValueError("lost"))
    theirs = ProcessFailure(1, 77, 1, variables["TORCHELASTIC_ERROR_FILE"])
    assert "ValueError: lost" in str(theirs.message)
    assert theirs.timestamp == read(variables, 1).time_ns // SECOND


def test_leaving_is_recorded_unless_an_exception_was(variables: dict[str, str]) -> None:
    record_leaving(variables)
    left = read(variables, exit_code=3, noticed_seconds=5)
    assert (left.exit_code, left.error) == (3, "")
    assert left.time_ns > 10**18

    Path(variables["TORCHELASTIC_ERROR_FILE"]).unlink()
    record_uncaught(variables)
    raise_here(ValueError("lost"))
    record_leaving(variables)
    assert "ValueError: lost" in read(variables, exit_code=1).error


def test_under_torchrun_nothing_is_written_at_a_good_end(variables: dict[str, str]) -> None:
    del variables["FARANDOLE_JOB"]
    record_leaving(variables)
    assert not Path(variables["TORCHELASTIC_ERROR_FILE"]).exists()


def test_nothing_is_recorded_outside_a_job() -> None:
    before = sys.excepthook
    record_uncaught({})
    record_leaving({})
    assert sys.excepthook is before


def test_an_unwritable_file_does_not_hide_the_traceback(
    variables: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    variables["TORCHELASTIC_ERROR_FILE"] += "/not/there"
    record_uncaught(variables)
    raise_here(ValueError("lost"))
    assert "ValueError: lost" in capsys.readouterr().err


def test_a_killed_worker_leaves_the_end_of_its_standard_error(variables: dict[str, str]) -> None:
    lines = [f"line {number}" for number in range(100)]
    stderr = Path(variables["TORCHELASTIC_ERROR_FILE"]).with_name("err")
    stderr.write_bytes("\n".join(lines).encode() + b"\nnot utf-8: \xff")
    failure = read(variables, exit_code=-9, noticed_seconds=100)
    assert failure.error.splitlines()[0] == "line 61"
    assert failure.error.splitlines()[-1].startswith("not utf-8")
    assert failure.time_ns < 100 * SECOND


@pytest.mark.parametrize("content", ["", "{", "[]", '{"message": "text"}', json.dumps({"a": 1})])
def test_a_foreign_error_file_is_no_news(variables: dict[str, str], content: str) -> None:
    Path(variables["TORCHELASTIC_ERROR_FILE"]).write_text(content)
    failure = read(variables, exit_code=7, noticed_seconds=100)
    assert (failure.exit_code, failure.error) == (7, "")

"""The clock of a trial: what counts, and when it is enough."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from farandole.worker.trial import clock
from farandole.worker.trial.record import ThroughputRecord, read_trial


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(clock, "time", time)
    return time


def begun(path: Path) -> clock.TrialClock:
    found = clock.trial_clock(0, torch.device("cpu"), {"FARANDOLE_GPU_TRIAL": str(path)})
    assert found is not None
    return found


def test_only_rank_0_of_a_trial_has_one(tmp_path: Path) -> None:
    named = {"FARANDOLE_GPU_TRIAL": str(tmp_path / "trial")}
    assert clock.trial_clock(1, torch.device("cpu"), named) is None
    assert clock.trial_clock(0, torch.device("cpu"), {}) is None


def test_steps_after_the_warm_up_count(tmp_path: Path, time: Time) -> None:
    path = tmp_path / "trial"
    trial = begun(path)
    for step in range(30):
        assert (read_trial(path) is None) == (step <= 10), step
        trial.batch(8)
        time.now += 5.0 if step < 10 else 0.125
    assert read_trial(path) == ThroughputRecord(10, 0, 0, 0.0), "the warm-up is over"
    trial.batch(8)
    assert read_trial(path) == ThroughputRecord(10, 20, 160, 2.5, is_enough=True)
    trial.batch(8)
    trial.close()
    assert read_trial(path) == ThroughputRecord(10, 20, 160, 2.5, is_enough=True)


def test_time_between_passes_does_not(tmp_path: Path, time: Time) -> None:
    trial = begun(tmp_path / "trial")
    for _ in range(10):
        trial.batch(8)
    for _ in range(2):
        for _ in range(3):
            trial.batch(8)
            time.now += 0.5
        trial.end_pass()
        time.now += 1000.0  # it evaluates
    trial.close()
    assert read_trial(tmp_path / "trial") == ThroughputRecord(10, 6, 48, 3.0)


def test_slow_steps_end_after_a_time(tmp_path: Path, time: Time) -> None:
    trial = begun(tmp_path / "trial")
    for _ in range(14):
        trial.batch(8)
        time.now += 11.0
    assert read_trial(tmp_path / "trial") == ThroughputRecord(10, 3, 24, 33.0, is_enough=True)

"""Progress on rank 0: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import io

import pytest

from farandole.data import BatchInfo
from farandole.train.progress import EpochProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr("farandole.train.progress.time.perf_counter", fake)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return fake


def go_through(progress: EpochProgress, clock: Clock, epoch: int, steps: int | None) -> None:
    """An epoch of 25 batches of 100 samples, a second each."""
    for step in range(25):
        progress.batch(epoch, BatchInfo(step, steps, 100, 1.0, 1, 100.0))
        clock.now += 1.0
    progress.end()


def test_elsewhere_a_line_every_ten_seconds(clock: Clock) -> None:
    stream = io.StringIO()
    progress = EpochProgress(stream)
    go_through(progress, clock, 3, 25)
    go_through(progress, clock, 4, None)  # of unknown length
    assert stream.getvalue().splitlines() == [
        "epoch 3: step 11 of 25, 110 samples/s",
        "epoch 3: step 21 of 25, 105 samples/s",
        "epoch 4: step 11, 110 samples/s",
        "epoch 4: step 21, 105 samples/s",
    ]


def test_on_a_terminal_a_bar_that_knows_its_loader(clock: Clock) -> None:
    stream = Terminal()
    progress = EpochProgress(stream)
    for step in range(5):
        clock.now += 1.0
        progress.batch(0, BatchInfo(step, 25, 100, 1.0, 1, 100.0))
    assert "5/25" in stream.getvalue()
    clock.now += 1.0
    progress.batch(7, BatchInfo(2, 9, 100, 1.0, 1, 100.0))  # another loader, such as the test set's
    assert "3/9" in stream.getvalue()
    assert "epoch 7" in stream.getvalue()
    progress.end()


def test_a_printed_line_goes_above_the_bar(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = Terminal()
    progress = EpochProgress(stream)
    progress.print("before [any] bar")
    assert capsys.readouterr().out == "before [any] bar\n"
    for step in range(3):
        clock.now += 1.0
        progress.batch(0, BatchInfo(step, 25, 100, 1.0, 1, 100.0))
    progress.print("loss 0.5 [not markup]")
    assert "loss 0.5 [not markup]" in stream.getvalue()
    progress.end()
    progress.end()  # twice does no harm

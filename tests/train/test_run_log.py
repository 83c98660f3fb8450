"""`run.log`: `metrics.jsonl`, TensorBoard, and what happens where neither can be written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from farandole.errors import FarandoleError, UserError
from farandole.report.history import read_history
from farandole.report.metrics import MetricsLog
from farandole.testing import run_world
from farandole.train import Run


def records(folder: Path) -> list[dict[str, Any]]:
    def refused(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refused) for line in lines]


def test_a_run_writes_start_logs_and_end(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        for _ in run.loader(list(range(10)), batch_size=2):  # type: ignore[arg-type]
            run.group.barrier()
        run.log(epoch=0, loss=0.25, accuracy=run.mean(0.5))
        run.log(epoch=1, note="done")

    run_world(2, body, folder=tmp_path)
    start, first, second, end = records(tmp_path / "world")
    assert (start["event"], start["name"], start["size"]) == ("start", "world", 2)
    assert (start["sync"], start["hosts"], start["seed"]) == ("allreduce", 1, 0)
    assert start["versions"]["torch"] == torch.__version__
    assert first["event"] == second["event"] == "log"
    assert first["metrics"] == {"epoch": 0, "loss": 0.25, "accuracy": 0.5}
    assert (first["samples"], first["steps"]) == (10, 3)
    assert first["waited_seconds"] > 0
    assert first["bytes_sent"] > 0
    assert second["metrics"] == {"epoch": 1, "note": "done"}
    assert end["event"] == "end"
    assert end["time"] >= second["time"] >= first["time"] > 0


def test_the_report_reads_what_the_run_wrote(tmp_path: Path) -> None:
    run_world(1, lambda run: run.log(loss=0.5, bad=math.nan), folder=tmp_path)
    history = read_history(tmp_path / "world" / "metrics.jsonl")
    assert history.finished
    assert not history.damage
    assert history.points[0].metrics["loss"] == 0.5
    assert math.isnan(history.points[0].metrics["bad"])


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (torch.tensor(math.inf), "inf"),
        (torch.tensor([[2.5]]), 2.5),
        (torch.tensor(3), 3),
        (torch.tensor(1.5, dtype=torch.bfloat16, requires_grad=True), 1.5),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (True, True),
        (2**70, 2**70),
        ('text, with "quotes"\nand a line end', 'text, with "quotes"\nand a line end'),
    ],
    ids=repr,
)
def test_values(tmp_path: Path, value: Any, written: Any) -> None:
    run_world(1, lambda run: run.log(value=value), folder=tmp_path)
    assert records(tmp_path / "world")[1]["metrics"]["value"] == written


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(2, 3), r"run\.log\(loss=…\).*shape \(2, 3\)"),
        (torch.zeros(0), r"shape \(0,\)"),
        (None, r"run\.log\(loss=None\)"),
        ([1.0], r"run\.log\(loss=\[1\.0\]\)"),
        (1j, "not a number"),
        ({"a": 1}, "not a number"),
    ],
    ids=repr,
)
def test_values_that_are_no_single_number(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_world(1, lambda run: run.log(loss=value), folder=tmp_path)
    assert not (tmp_path / "world").exists()  # nothing half-written


def test_tensorboard_shows_the_same_by_samples(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        for epoch in range(3):
            for _ in run.loader(list(range(10)), batch_size=2):  # type: ignore[arg-type]
                pass
            run.log(loss=1.0 / (epoch + 1), broken=math.nan)

    run_world(2, body, folder=tmp_path)
    board = EventAccumulator(str(tmp_path / "world")).Reload()
    losses = board.Scalars("loss")
    assert [event.step for event in losses] == [10, 20, 30]
    assert [event.value for event in losses] == pytest.approx([1, 1 / 2, 1 / 3])
    assert all(math.isnan(event.value) for event in board.Scalars("broken"))


def test_only_rank_0_writes(tmp_path: Path) -> None:
    run_world(3, lambda run: run.log(rank=run.rank), folder=tmp_path)
    logged = [record for record in records(tmp_path / "world") if record["event"] == "log"]
    assert [record["metrics"]["rank"] for record in logged] == [0]
    assert len(list((tmp_path / "world").glob("events.out.tfevents.*"))) == 1


def test_a_run_that_logs_nothing_leaves_nothing(tmp_path: Path) -> None:
    run_world(2, lambda run: run.mean(1.0), folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_folder_is_named_with_a_way_out(tmp_path: Path) -> None:
    """Where a file is in the way: root may write anywhere else."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(FarandoleError, match=r"cannot write metrics to .*file/world.*fd\.init"):
        run_world(1, lambda run: run.log(loss=1.0), folder=tmp_path / "file")


def test_a_disk_that_fills_up_later_is_named_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: MetricsLog, *_: object) -> None:
        raise OSError(28, "No space left on device")

    def body(run: Run) -> None:
        run.log(loss=1.0)
        monkeypatch.setattr(MetricsLog, "log", full)
        run.log(loss=0.5)

    with pytest.raises(FarandoleError, match=r"cannot write metrics.*No space left on device"):
        run_world(1, body, folder=tmp_path)


def test_an_end_that_cannot_be_written_hides_no_other_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: MetricsLog, *_: object) -> None:
        raise OSError(28, "No space left on device")

    def body(run: Run) -> None:
        run.log(loss=1.0)
        monkeypatch.setattr(MetricsLog, "_write", full)
        raise KeyError("what really went wrong")

    with (
        pytest.warns(UserWarning, match=r"the end of .*world is not written: .*No space left"),
        pytest.raises(KeyError, match="what really went wrong"),
    ):
        run_world(1, body, folder=tmp_path)


def test_a_second_run_of_the_same_name_sets_the_first_aside(tmp_path: Path) -> None:
    for value in (1.0, 2.0, 3.0):
        run_world(1, lambda run, value=value: run.log(loss=value), folder=tmp_path)

    def losses(folder: Path) -> list[float]:
        board = EventAccumulator(str(folder)).Reload()
        from_board = [event.value for event in board.Scalars("loss")]
        assert from_board == [r["metrics"]["loss"] for r in records(folder) if r["event"] == "log"]
        return from_board

    folder = tmp_path / "world"
    earlier = sorted(folder.glob("earlier-*"))
    assert losses(folder) == [3.0]
    assert [losses(path) for path in earlier] == [[1.0], [2.0]]
    assert all((path / "memory" / "rank-0.jsonl").is_file() for path in (*earlier, folder))


def test_a_resumed_run_adds_to_its_own_metrics(tmp_path: Path) -> None:
    def first(run: Run) -> tuple[float, int]:
        run.distribute(torch.nn.Linear(1, 1))
        run.group.all_reduce(torch.zeros(1000))
        run.log(loss=1.0)
        run.save()
        return run.group.meter.waited_seconds, run.group.meter.bytes_sent

    def second(run: Run) -> None:
        run.distribute(torch.nn.Linear(1, 1))
        run.load()
        run.log(loss=0.5)

    (waited, sent), _ = run_world(2, first, folder=tmp_path)
    run_world(2, second, folder=tmp_path)
    events = records(tmp_path / "world")
    assert [event["event"] for event in events] == ["start", "log", "end"] * 2
    before, after = (event for event in events if event["event"] == "log")
    for counter in ("time", "waited_seconds", "bytes_sent"):
        assert after[counter] >= before[counter] > 0
    assert after["bytes_sent"] < 2 * sent  # goes on; is not counted twice
    assert before["waited_seconds"] <= waited


def test_the_printed_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_world(2, lambda run: run.log(epoch=3, loss=0.123456789, note="ok"), folder=tmp_path)
    printed = capfd.readouterr().out
    assert printed.startswith("epoch 3  loss 0.1235  note ok  ·  ")
    assert printed.count("\n") == 1  # on rank 0 only

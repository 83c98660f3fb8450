"""A full disk: the error says so, nothing is left behind, and what was saved stays good."""

from __future__ import annotations

import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from farandole.errors import CheckpointError, FarandoleError
from farandole.report.history import read_history
from farandole.testing import run_world
from farandole.train import Run
from farandole.train.checkpoint import checkpoint
from farandole.train.checkpoint.automatic.policy import Checkpoints

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 96 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system needs root")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for _ in range(10_000):
            try:
                file.write(b"x" * 4096)
            except OSError:
                return filler
    raise AssertionError("the disk has no end")


def test_a_save_that_does_not_fit(small_disk: Path) -> None:
    def body(run: Run) -> list[str]:
        run.save(small=torch.ones(10))
        messages = []
        for shape in (2**15, 2**14, 2**16):  # fails in the file, or in the manifest after it
            with pytest.raises(CheckpointError) as caught:
                run.save(large=torch.zeros(shape), tail=["x" * 2**15])
            messages.append(str(caught.value))
        run.save(small=torch.full((10,), 2.0))  # there is room again for this one
        return messages

    (messages, others) = run_world(2, body, folder=small_disk)
    folder = small_disk / "world/checkpoints"
    for message in messages:
        assert "No space left on device" in message
        assert "Free some space or pass another path" in message
        assert f"The last good checkpoint is {folder / '000000'}" in message
    assert all("No space left on device" in message for message in others)
    assert sorted(path.name for path in folder.iterdir()) == ["000000", "000001"]
    for name, value in (("000000", 1.0), ("000001", 2.0)):
        assert checkpoint.read(folder / name)["state"]["small"].tolist() == [value] * 10


def test_no_room_even_for_a_folder(small_disk: Path) -> None:
    def body(run: Run) -> None:
        run.save(best=1)
        filler = fill(small_disk)
        with pytest.raises(CheckpointError, match=r"No space left.*last good .*000000"):
            run.save(best=2, more=torch.zeros(5000))
        filler.unlink()
        run.save(best=3)

    run_world(1, body, folder=small_disk)
    folder = small_disk / "world/checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["000000", "000001"]


def test_automatic_saves_wait_for_room(
    small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = [torch.ones(1)] * 8

    def body(run: Run) -> None:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run.distribute(model, optimizer)
        filler = small_disk
        for x in run.loader(data, batch_size=1):  # type: ignore[arg-type]
            model(x).mean().backward()
            optimizer.step()
            if run.steps == 2:
                run.wait_for_save()
                filler = fill(small_disk)
            if run.steps == 5:
                filler.unlink()

    run_world(1, body, folder=small_disk, checkpoints=Checkpoints(every="2steps", keep=9))
    told = capsys.readouterr().out
    assert "No space left on device" in told
    assert "Training goes on" in told
    folder = small_disk / "world/checkpoints"
    steps = [checkpoint.read(folder / name)["run"]["steps"] for name in checkpoint.names(folder)]
    assert steps[-1] == 6
    assert not list(folder.glob(".*.tmp"))


def test_metrics_on_a_full_disk(small_disk: Path) -> None:
    logged = [0.0]
    refused = r"cannot write metrics.*No space left on device"

    def go_on(run: Run) -> None:
        for step in range(1, 1000):  # the last block of the file has room for some
            run.log(loss=float(step))
            logged.append(float(step))

    def body(run: Run) -> None:
        run.log(loss=0.0)
        fill(small_disk)
        with pytest.raises(FarandoleError, match=refused):
            go_on(run)
        for length in (100, 300, 1000):  # a script that goes on regardless
            with pytest.raises(FarandoleError, match=refused):
                run.log(note="x" * length)

    with warnings.catch_warnings(record=True):  # the end may find room, or be warned of
        warnings.simplefilter("always")
        run_world(1, body, folder=small_disk)
    written = small_disk / "world/metrics.jsonl"
    assert written.read_bytes().endswith(b"}\n")  # no line is torn
    history = read_history(written)
    assert not history.damage
    assert [point.metrics["loss"] for point in history.points] == logged


def test_a_limit_on_the_size_of_files(sandbox: Any, tmp_path: Path) -> None:
    """What anyone can test without root."""
    done = sandbox.fork(SCRIPTS / "save_under_limit.py", tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "limited/checkpoints"
    assert "refused: could not save to" in done.stdout
    assert "File too large" in done.stdout
    assert f"The last good checkpoint is {folder / '000000'}" in done.stdout
    assert [path.name for path in folder.iterdir()] == ["000000"]
    assert checkpoint.read(folder / "000000")["state"]["small"].tolist() == [0.0] * 10

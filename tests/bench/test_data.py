"""`farandole bench data`: a real script is measured and ended; the advice; where the time goes."""

from __future__ import annotations

import builtins
import io
import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch.utils.data import Dataset, Subset, default_collate

import farandole as fd
from farandole.bench.data import InputFigures, changes, lines
from farandole.cli import commands
from farandole.data.bench.stage_times import StageClock, time_stages
from farandole.errors import UserError

Cli = Callable[..., subprocess.CompletedProcess[str]]

SCRIPT = """
import sys
import torch
import farandole as fd
from torch import nn
from torch.utils.data import TensorDataset

run = fd.init()
model = nn.Linear(4, 3)
model, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
data = TensorDataset(torch.randn(96, 4), torch.arange(96) % 3)
for epoch in run.epochs(2):
    with torch.no_grad():
        for x, y in run.loader(data, 8):
            pass
    for step, (x, y) in enumerate(run.loader(data, 8)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step == int(sys.argv[1]):
            break
print("the script went on")
"""


def test_a_script_is_measured_and_ended(farandole_cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["-n", "2", "--batches", "3", "--warmup", "1", "--json", "out.json"]
    done = farandole_cli("bench", "data", *options, "train.py", "-1")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert min(found[side] for side in ("input", "model", "both")) > 0
    assert (found["ranks"], found["global_batch"], found["num_workers"]) == (2, 16, 0)
    assert set(found["stages"]) == {"read and decode", "collate", "copy"}
    assert "limits: the" in done.stdout
    assert "the script went on" not in done.stdout
    assert not (tmp_path / "runs").exists()
    left = farandole_cli("bench", "data", "--batches", "3", "train.py", "2")
    assert left.returncode == 1
    assert "left its loop after 3 batches, before all was measured. It takes 9" in left.stderr


def test_what_cannot_be_measured_is_named(farandole_cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("print('no loader')")
    done = farandole_cli("bench", "data", "other.py")
    assert done.returncode == 1
    assert "ended before it read a batch of run.loader" in done.stderr
    found = CliRunner().invoke(commands, ["bench", "data", "--batches", "0", "other.py"])
    assert isinstance(found.exception, UserError)
    assert "--batches 0" in str(found.exception)


FIGURES = InputFigures(
    both=100.0,
    model=400.0,
    input=100.0,
    ranks=1,
    global_batch=8,
    num_workers=0,
    pin_memory=False,
    cores=8,
    device="cpu",
    chunked=False,
    stages={"open": 6e-4, "read and decode": 4e-4},
)


def test_advice() -> None:
    said = "\n".join(lines(FIGURES))
    assert "The input limits: the model alone is 4.0 times as fast." in said
    assert "open                  600.0 µs   60%" in said
    first, second = changes(FIGURES)
    assert "farandole pack" in first
    assert second.startswith("num_workers=7 instead of 0")
    busy = replace(FIGURES, num_workers=7, stages={"decode": 1.0})
    assert [line[:9] for line in changes(busy)] == ["All cores"]
    copied = replace(busy, stages={"copy": 1.0}, device="cuda:0")
    assert [line[-17:] for line in changes(copied)] == [" pin_memory=True."]
    model = replace(FIGURES, model=50.0, both=49.0)
    assert list(changes(model)) == []
    assert "nothing to change" in "\n".join(lines(model))
    (turns,) = changes(replace(model, both=30.0))
    assert turns.startswith("num_workers=1:")
    (fewer,) = changes(replace(model, both=30.0, num_workers=4))
    assert "fewer num_workers" in fewer


def test_time_within_a_stage_is_not_that_of_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = StageClock()

    def wait(seconds: float) -> None:
        now[0] += seconds

    timed = clock.around("inner", wait)
    timed(5.0)  # outside
    with clock.stage("outer"):
        wait(1.0)
        timed(2.0)
        wait(1.0)
    assert clock.seconds == {"outer": 2.0, "inner": 2.0}


class Files(Dataset[Any]):
    def __init__(self, path: Path) -> None:
        self._path = path
        self.transform = lambda text: torch.tensor(len(text))

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.transform(self._path.read_text())


def test_stages_of_datasets_and_nothing_stays_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    dataset = Files(tmp_path / "a.txt")
    transform, opens = dataset.transform, (builtins.open, io.open)
    found = time_stages(Subset(dataset, [0, 2]), [[0, 1]], default_collate, lambda batch: None)
    assert list(found) == ["open", "read and decode", "transform", "collate", "copy"]
    assert dataset.transform is transform
    assert (builtins.open, io.open) == opens
    np.save(tmp_path / "rows.npy", np.zeros((20, 3)))
    rows = fd.data.array(tmp_path / "rows.npy", chunk_bytes=48, transform=torch.from_numpy)
    (source,) = rows.sources
    found = time_stages(rows, [[3, 17, 4]], default_collate, lambda batch: None)
    assert {"read", "decode", "transform"} <= set(found)
    assert "read" not in vars(source)
    assert rows.chunks_read == 0

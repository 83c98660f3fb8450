"""A forward that calls functions of another file: what these read is watched as well.

Two files are written and imported, as a user's would be: a model, and helpers with globals.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from farandole import FarandoleError
from farandole.testing import run_world
from farandole.train import Run
from tests.layout.models import sgd

DEEPER = """
LEVEL = 2.0

def scaled(x):
    return x * LEVEL
"""
HELPERS = """
from types import SimpleNamespace
import the_deeper_helpers as deeper

FACTOR, UNUSED, CALLS = 2.0, 1.0, 0
SETTINGS = SimpleNamespace(gain=1.0)

class Config:
    bias = 0.5

def shifted(x):
    return [each + Config.bias for each in (x,)][0]

def scale(x):
    return shifted(deeper.scaled(x * FACTOR) * SETTINGS.gain)

def counted(x):
    global CALLS
    CALLS += 1
    return x * CALLS
"""
MODEL = """
import the_helpers as helpers
from the_helpers import scale
from torch import nn

class Net(nn.Module):
    def __init__(self, called):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 3)
        self.called = called

    def forward(self, x):
        x = self.first(x)
        if self.called == "module":
            x = helpers.scale(x)
        elif self.called == "function":
            x = scale(x)
        elif self.called == "counted":
            x = helpers.counted(x)
        return self.second(x)
"""
NAMES = {"the_deeper_helpers": DEEPER, "the_helpers": HELPERS, "the_model": MODEL}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    for name, text in NAMES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield {name: importlib.import_module(name) for name in NAMES}
    for name in NAMES:
        del sys.modules[name]


def trained(
    files: dict[str, ModuleType],
    called: str,
    change: Callable[[dict[str, Any]], None],
    folder: Path,
) -> None:
    torch.manual_seed(1)
    models = [files["the_model"].Net(called) for _ in range(2)]
    x, y = torch.randn(4, 3), torch.randn(4, 3)

    def body(run: Run) -> None:
        trainer = run.trainer(models[run.rank], F.mse_loss, sgd, layout="stages=2", check=False)
        trainer.step(x, y)
        run.group.barrier()
        if run.rank == 0:
            change(files)
        run.group.barrier()
        trainer.step(x, y)

    run_world(2, body, folder=folder)


CHANGES: dict[str, Callable[[Any], None]] = {
    "the_helpers.FACTOR": lambda files: setattr(files["the_helpers"], "FACTOR", 3.0),
    "the_deeper_helpers.LEVEL": lambda files: setattr(files["the_deeper_helpers"], "LEVEL", 3.0),
    "SETTINGS.gain": lambda files: setattr(files["the_helpers"].SETTINGS, "gain", 3.0),
    "Config.bias": lambda files: setattr(files["the_helpers"].Config, "bias", 3.0),
}


@pytest.mark.parametrize("called", ["module", "function"])
@pytest.mark.parametrize("name", CHANGES)
def test_what_helpers_read_is_watched(
    name: str, called: str, files: dict[str, ModuleType], tmp_path: Path
) -> None:
    with pytest.raises(FarandoleError, match=rf"{name} \(from .* to 3.0\) was changed after the"):
        trained(files, called, CHANGES[name], tmp_path)


def test_what_helpers_change_is_no_recording(files: dict[str, ModuleType], tmp_path: Path) -> None:
    with pytest.raises(
        FarandoleError, match=r"its forward changes the_helpers.CALLS \(from 0 to 1"
    ):
        trained(files, "counted", lambda files: None, tmp_path)
    assert files["the_helpers"].CALLS == 0  # put back


def test_what_nobody_reads_may_change(files: dict[str, ModuleType], tmp_path: Path) -> None:
    trained(files, "module", lambda files: setattr(files["the_helpers"], "UNUSED", 3.0), tmp_path)

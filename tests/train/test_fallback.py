"""A newest checkpoint that is damaged or not finite: refused, or on request passed over."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.errors import CheckpointError
from farandole.testing import run_world
from farandole.train import Run
from farandole.train.checkpoint import checkpoint
from farandole.train.settings import Settings


def distributed(run: Run) -> nn.Linear:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    run.distribute(model, optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model


def save(run: Run, model: nn.Linear, weight: float, **options: Any) -> Path:
    nn.init.constant_(model.weight, weight)
    return run.save(weight=weight, **options)


def saved(folder: Path, *weights: float, size: int = 2) -> Path:
    """A folder with a checkpoint of each weight."""

    def body(run: Run) -> None:
        model = distributed(run)
        for weight in weights:
            save(run, model, weight, keep=10)

    run_world(size, body, folder=folder)
    return folder / "world/checkpoints"


def damage(path: Path) -> None:
    file = path / "model-0.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")


def test_on_request_the_newest_good_one_is_taken(tmp_path: Path) -> None:
    folder = saved(tmp_path, 0.0, 1.0, 2.0, 3.0)
    damage(folder / "000003")
    damage(folder / "000002")

    def refused(run: Run) -> str:
        distributed(run)
        with pytest.raises(CheckpointError) as caught:
            run.load()
        return str(caught.value)

    for message in run_world(2, refused, folder=tmp_path):
        assert "000003 is refused: model-0.safetensors does not match its checksum" in message
        assert f"The last good one is {folder / '000001'}" in message
        assert "--fallback" in message

    def goes_on(run: Run) -> None:
        run._saving._checkpoints._fallback = True
        model = distributed(run)
        assert run.load() == {"weight": 1.0}
        assert model.weight.unique().tolist() == [1.0]
        assert save(run, model, 4.0, keep=2).name == "000004"
        assert save(run, model, 5.0, keep=2).name == "000005"

    with pytest.warns(UserWarning, match="is refused") as told:
        run_world(2, goes_on, folder=tmp_path)
    first, second = [str(each.message) for each in told]
    assert "000003 is refused" in first
    assert "000002 is refused" in second
    # Numbers are not used again, and what was passed over is not removed.
    assert checkpoint.names(folder) == ["000002", "000003", "000004", "000005"]
    assert checkpoint.newest_good(folder) == folder / "000005"


def test_one_that_is_asked_for_by_its_path_is_not_replaced(tmp_path: Path) -> None:
    folder = saved(tmp_path, 0.0, 1.0, size=1)
    damage(folder / "000001")

    def body(run: Run) -> None:
        run._saving._checkpoints._fallback = True
        distributed(run)
        with pytest.raises(CheckpointError, match=r"000001 is refused.*last good one is .*000000"):
            run.load(folder / "000001")
        damage(folder / "000000")
        with pytest.raises(CheckpointError, match=r"000001 is refused.*No checkpoint in"):
            run.load(folder)

    run_world(1, body, folder=tmp_path)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_that_has_diverged_is_refused_unless_it_is_asked_for(
    tmp_path: Path, value: float
) -> None:
    folder = saved(tmp_path, 0.0, value)

    def body(run: Run) -> None:
        model = distributed(run)
        with pytest.raises(CheckpointError) as caught:
            run.load()
        assert "training had diverged, model-0: weight is not finite" in str(caught.value)
        assert f"The last good one is {folder / '000000'}" in str(caught.value)
        assert torch.isfinite(model.weight).all()
        run.load(folder / "000001")
        assert not torch.isfinite(model.weight).any()

    with pytest.warns(UserWarning, match="000001 was saved when training had diverged"):
        run_world(2, body, folder=tmp_path)


def test_the_last_finite_one_stays(tmp_path: Path) -> None:
    nan = math.nan
    folder = tmp_path / "world/checkpoints"

    def body(run: Run) -> None:
        model = distributed(run)
        for weight in (0.0, 1.0, nan, nan, nan):
            save(run, model, weight, keep=2)
        assert checkpoint.names(folder) == ["000001", "000003", "000004"]
        assert checkpoint.newest_good(folder) == folder / "000001"
        for weight in (2.0, 3.0):  # it has recovered
            save(run, model, weight, keep=2)
        assert checkpoint.names(folder) == ["000005", "000006"]

    run_world(1, body, folder=tmp_path)


def test_infinity_in_a_buffer_is_no_divergence(tmp_path: Path) -> None:
    """Masks of attention are made of it. In the moments of an optimizer it is one."""

    class Masked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_buffer("mask", torch.full((2,), -math.inf))

    def body(run: Run) -> list[bool]:
        model = Masked()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        run.distribute(model, optimizer)
        found = [checkpoint.is_finite(run.save(best=math.inf))]
        nn.init.constant_(model.weight, 3e38)  # whose sum overflows
        found.append(checkpoint.is_finite(run.save()))
        optimizer.state[model.weight]["momentum_buffer"] = torch.full((2, 2), math.inf)
        found.append(checkpoint.is_finite(run.save()))
        optimizer.state[model.weight]["momentum_buffer"].zero_()
        model.mask.fill_(math.nan)
        found.append(checkpoint.is_finite(run.save()))
        return found

    assert run_world(1, body, folder=tmp_path) == [[True, True, False, False]]


def test_checkpoints_from_before_say_nothing_and_load(tmp_path: Path) -> None:
    folder = saved(tmp_path, 1.0, size=1)
    manifest = json.loads(json.loads((folder / "000000/manifest.json").read_text())["body"])
    assert manifest.keys() == {"format", "files", "trees"}
    assert manifest["format"] == 1


def test_how_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Settings.from_environ({"FARANDOLE_FALLBACK": "1"}).fallback
    assert not Settings.from_environ({"FARANDOLE_FALLBACK": "0"}).fallback
    with fd.init() as run:
        assert not run._saving._checkpoints._fallback
    with fd.init(fallback=True) as run:
        assert run._saving._checkpoints._fallback


SCRIPT = """
import torch, farandole as fd
run = fd.init()
model = torch.nn.Linear(2, 2)
run.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
print("state", run.load())
"""


def test_the_command_line(sandbox: Any, tmp_path: Path) -> None:
    folder = saved(tmp_path / "runs", 1.0, 2.0, size=1)
    damage(folder / "000001")
    script = sandbox.script("script.py", SCRIPT.replace("0.1)", "0.1, momentum=0.9)"))
    done = sandbox.farandole("run", "-n", "1", "--name", "world", "--fallback", script)
    assert done.returncode == 0, done.stderr
    assert "state {'weight': 1.0}" in done.stdout
    assert "000001 is refused" in done.stdout + done.stderr

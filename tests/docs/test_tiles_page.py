"""The page about tiles: its scripts run, its layouts parse, and it shows what is printed."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import farandole
from farandole.errors import UserError
from farandole.layout import parse_layout
from farandole.layout.tile_groups import TileGroups, describe_grid
from farandole.layout.tiles.core.table import functions
from farandole.testing import run_world
from farandole.train import Run

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/tiles.md").read_text()
FILES = (*(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.py"), ROOT / "README.md")
TEXTS = {
    text.rstrip(".,")
    for file in FILES
    for text in re.findall(r"(?<![\w,])(?:tiles|channels)=\d[\w.,=+-]*", file.read_text())
}
FIRST, DATASET, LOOP, TOWERS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SAMPLES, SIZE = 4, 16


@pytest.mark.parametrize("text", sorted(TEXTS))
def test_what_a_page_tells_to_type_parses(text: str) -> None:
    parse_layout(text)


def test_there_is_much_to_check() -> None:
    assert {"tiles=2x2", "tiles=2x2,stages=3,tiled=2", "channels=2,tiles=2x1"} <= TEXTS


def world(folder: Path, *scripts: str, **given: Any) -> list[dict[str, Any]]:
    """What the scripts leave behind, on four ranks that have a model."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * SIZE**2, 2)]
    models = [nn.Sequential(*copy.deepcopy(layers)) for _ in range(4)]

    def body(run: Run) -> dict[str, Any]:
        names = {"run": run, "model": models[run.rank], "fd": farandole, "torch": torch, "F": F}
        names |= {"np": np, **given}
        for script in scripts:
            exec(script, names)
        return names

    return run_world(4, body, folder=folder)


def test_its_scripts_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same from a tensor as from a file of which each rank reads a tile."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(SAMPLES, 1, SIZE, SIZE, generator=generator)
    labels = torch.arange(SAMPLES) % 2
    monkeypatch.chdir(tmp_path)
    np.save("slides.npy", images.numpy())
    dataset = TensorDataset(images, labels)
    whole = world(tmp_path / "whole", FIRST, dataset=dataset)
    # In the first script only the trainer is wanted here: its loop has nothing to read.
    made = FIRST.split("for x, y in")[0]
    tiled = world(tmp_path / "tiled", made, DATASET, LOOP, labels=labels)
    losses = [float(names["loss"]) for names in (*whole, *tiled)]
    assert losses == pytest.approx([losses[0]] * 8, rel=1e-5)
    piece = tiled[0]["x"].pieces[0]
    assert tuple(piece.shape) == (2, 1, SIZE // 2, SIZE // 2)


def test_a_dataset_that_gives_no_tile_is_told(tmp_path: Path) -> None:
    np.save(tmp_path / "slides.npy", np.zeros((SAMPLES, 1, SIZE, SIZE), np.float32))
    script = LOOP.replace('"slides.npy"', "path")
    wrong = DATASET.replace("*box)", "*(slice(0, 5),) * 2)")
    with pytest.raises(UserError, match=r"a tile of \(8, 8\).* shapes \[\(2, 1, 5, 5\), \(2,\)\]"):
        world(
            tmp_path,
            FIRST.split("for x, y in")[0],
            wrong,
            script,
            labels=torch.zeros(SAMPLES, dtype=torch.long),
            path=tmp_path / "slides.npy",
        )


def test_its_towers_can_be_built() -> None:
    names: dict[str, Any] = {"fd": farandole}
    with torch.device("meta"):
        exec(TOWERS, names)
    assert names["model"].conv2.conv.groups == names["layout"].channels == 2


def test_the_grid_is_what_is_printed() -> None:
    (command,) = re.findall(r"farandole run -n 24 --layout (\S+) ", PAGE)
    layout = parse_layout(command)
    replicas = 24 // layout.ranks
    assert (
        describe_grid(TileGroups(layout.group_sizes), layout.pipeline(), layout, replicas) in PAGE
    )


def test_the_losses_it_names_are_computed_on_tiles() -> None:
    (named,) = re.findall(r"computed\s+on\s+tiles: (.*?), both", PAGE, re.DOTALL)
    losses = [getattr(F, name) for name in re.findall(r"`(\w+)`", named)]
    losses += [F.binary_cross_entropy, F.binary_cross_entropy_with_logits]
    assert len(losses) == 8
    assert set(losses) <= functions().keys()


def test_a_grid_of_another_number_of_axes_is_told(tmp_path: Path) -> None:
    script = FIRST.replace("tiles=(2, 2)", "tiles=(4,)")
    dataset = TensorDataset(torch.randn(SAMPLES, 1, SIZE, SIZE), torch.arange(SAMPLES) % 2)
    with pytest.raises(farandole.StageError, match=r"an image of 1 axis.* \[\(2, 1, 16, 16\)\]"):
        world(tmp_path, script, dataset=dataset)

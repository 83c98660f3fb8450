"""tile_facts.py FOLDER: what tiles on real processes find; then one rank dies.

Writes FOLDER/<rank>.json. Rank 1 kills itself where the others wait for its halo, at the very end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import farandole as fd
from farandole.layout import parse_layout
from farandole.train.settings import Settings

LAYOUTS = (
    "tiles=2x2",
    "tiles=4x1,halo=2",
    "tiles=2x2,overlap=false,recompute,recompute_blocks=2",
    "tiles=2x1,stages=2",
    "tiles=2x1,channels=2",
)
ALONE = "tiles=2x2,in_turn"
SIZE = 13


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Dropout(0.2),
        nn.Conv2d(4, 4, 5, stride=2, padding=2),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(36, 5),
        nn.BatchNorm1d(5),
        nn.Linear(5, 3),
    )


class Deadly(nn.Module):
    """Kills the process of rank 1 in the third step."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3 and self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return x


def another(run: fd.Run, *, alone: bool = False) -> fd.Run:
    """A run with a layout has one model."""
    group = run.group.subgroup([run.rank]) if alone else run.group
    settings = Settings(name=f"other-{run.rank}", folder=run.folder, script="facts")
    return fd.Run(group, run.topology, run.device, settings=settings, seed=3)


def trained(run: fd.Run, layout: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    trainer = run.trainer(
        network(),
        F.cross_entropy,
        lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9),
        layout=parse_layout(layout),
    )
    losses = [trainer.step(x[step:], y[step:]) for step in range(4)]
    return torch.cat([torch.stack(losses), trainer.predict(x).flatten()])


def main(folder: Path) -> None:
    torch.set_default_dtype(torch.float64)
    run = fd.init(timeout=150)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 2, SIZE, SIZE, generator=generator)
    y = torch.randint(3, (6,), generator=generator)
    truth = trained(another(run, alone=True), ALONE, x, y)
    found: dict[str, Any] = {}
    found["errors"] = {
        layout: float((trained(another(run), layout, x, y) - truth).abs().max())
        for layout in LAYOUTS
    }
    found["bytes_sent"] = run.group.meter.bytes_sent
    layers = (nn.Conv2d(2, 2, 3, padding=1), Deadly(run.rank), nn.Conv2d(2, 3, 3, padding=1))
    trainer = another(run).trainer(
        nn.Sequential(*layers),
        lambda found, wanted: found.mean(),
        lambda ps: torch.optim.SGD(ps, 0.1),
        layout=parse_layout("tiles=2x2"),
    )
    try:
        for _ in range(4):
            trainer.step(x, y)
        found["death"] = "nobody noticed"
    except fd.StageError as error:
        found["death"] = str(error)
    (folder / f"{run.rank}.json").write_text(json.dumps(found))
    os._exit(0)  # gloo's threads still wait for the one that died


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""pipe_facts.py FOLDER: what pipelines between real processes find; then one rank dies.

Writes FOLDER/<rank>.json. Rank 1 kills itself in the middle of a schedule, at the very end.
"""

from __future__ import annotations

import copy
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
    "stages=3,microbatches=4",
    "stages=3,microbatches=4,schedule=zero-bubble",
    "stages=3,microbatches=4,schedule=gems",
    "stages=2,microbatches=4,replicas=2+1",
    "stages=3,microbatches=3,recompute",
)
WIDE = 90_000  # values in a row: messages larger than what shared memory takes at once


def network(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(6, 6), nn.Tanh(), nn.Dropout(dropout)]
    return nn.Sequential(*layers)


class Wide(nn.Module):
    """What it returns takes megabytes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :1] * torch.ones(WIDE)


class Narrow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1, keepdim=True)


class Deadly(nn.Module):
    """Kills its process in the second forward of the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return x


def runs(run: fd.Run) -> fd.Run:
    """Another run over the same group: a run with a layout has one model."""
    settings = Settings(name="other", folder=run.folder, script="facts")
    return fd.Run(run.group, run.topology, run.device, settings=settings, seed=3)


def trained(run: fd.Run, model: nn.Module, layout: str | None, x: torch.Tensor) -> torch.Tensor:
    trainer = runs(run).trainer(
        model,
        F.mse_loss,
        lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9),
        layout=parse_layout(layout) if layout else None,
    )
    for step in range(3):
        trainer.step(x[step:], x[step:].flip(1))
    result: torch.Tensor = trainer.predict(x)
    return result


def main(folder: Path) -> None:
    torch.set_default_dtype(torch.float64)
    run = fd.init(timeout=150)
    x = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
    found: dict[str, Any] = {}
    plain = copy.deepcopy(network())
    optimizer = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        F.mse_loss(plain(x[step:]), x[step:].flip(1)).backward()
        optimizer.step()
    expected = plain(x).detach()
    found["errors"] = {
        layout: float((trained(run, network(), layout, x) - expected).abs().max())
        for layout in LAYOUTS
    }
    # Random numbers do not depend on the cut or the schedule. One alone computes the truth.
    alone = fd.Run(
        run.group.subgroup([run.rank]),
        run.topology,
        run.device,
        settings=Settings(name=f"alone-{run.rank}", folder=run.folder, script="facts"),
        seed=3,
    )
    trainer = alone.trainer(
        network(0.5),
        F.mse_loss,
        lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9),
        layout=parse_layout("stages=1,microbatches=4"),
    )
    for step in range(3):
        trainer.step(x[step:], x[step:].flip(1))
    truth = trainer.predict(x)
    found["dropout"] = {
        layout: float((trained(run, network(0.5), layout, x) - truth).abs().max())
        for layout in (LAYOUTS[0], LAYOUTS[1], "stages=3,microbatches=4,recompute")
    }
    wide = nn.Sequential(nn.Linear(6, 6), Wide(), Narrow(), nn.Linear(1, 6))
    whole = copy.deepcopy(wide)
    F.mse_loss(whole(x), x).backward()
    trainer = runs(run).trainer(
        wide,
        F.mse_loss,
        lambda ps: torch.optim.SGD(ps, 1.0),
        layout=parse_layout("stages=3,microbatches=2,balance=2+1+1"),
    )
    before = {name: value.clone() for name, value in whole.state_dict().items()}
    trainer.step(x, x)
    after = trainer.predict(x)
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            parameter.copy_(before[name] - parameter.grad)
    found["wide"] = float((after - whole(x)).detach().abs().max())
    found["bytes_sent"] = run.group.meter.bytes_sent

    deadly = nn.Sequential(nn.Linear(6, 6), Deadly(), nn.Linear(6, 6))
    trainer = runs(run).trainer(
        deadly,
        F.mse_loss,
        lambda ps: torch.optim.SGD(ps, 0.1),
        layout="stages=3,microbatches=4",
        check=False,  # it would die of that
    )
    trainer.step(x, x)
    try:
        trainer.step(x, x)
        found["death"] = "nobody noticed"
    except fd.StageError as error:
        found["death"] = str(error)
    (folder / f"{run.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

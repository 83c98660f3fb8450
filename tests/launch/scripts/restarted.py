"""Trains a small model, in stages or as a whole, and ends in the middle of it where it is told to.

restarted.py RANK:STEP:HOW:ATTEMPT[:WHERE] …

how: kill, raise, refuse, hang. attempt: a number, or *. where: before the step, in the loss (of the
last stage), in the update of the weights, or after the step.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import farandole as fd
from farandole.errors import UserError

DOOMED = [(*word.split(":"), "before")[:5] for word in sys.argv[1:]]
ATTEMPT = os.environ.get("FARANDOLE_ATTEMPT", "")


def end_if(rank: int, step: int, at: str) -> None:
    for doomed, when, how, attempt, where in DOOMED:
        if (str(rank), str(step), at) != (doomed, when, where) or attempt not in ("*", ATTEMPT):
            continue
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "refuse":
            raise UserError("batch_size=-1 must be above 0.")
        if how == "hang":
            Path("hangs").write_text(str(os.getpid()))
            time.sleep(600)
        raise ValueError(f"sample {step} cannot be read")


def main() -> None:
    run = fd.init(timeout=100)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        end_if(run.rank, run.steps, "loss")
        return nn.functional.mse_loss(output, target)

    class Doomed(torch.optim.SGD):
        def step(self, closure: None = None) -> None:
            end_if(run.rank, run.steps, "update")
            super().step(closure)

    trainer = run.trainer(model, loss_of, lambda ps: Doomed(ps, 0.1, momentum=0.9))
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(5))
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).tanh())
    for epoch in run.epochs(3):
        for inputs, targets in trainer.loader(data, batch_size=4):
            end_if(run.rank, run.steps, "before")
            loss = trainer.step(inputs, targets)
            with Path(f"steps-{run.name}").open("a") as file:
                file.write(f"{run.rank} {ATTEMPT} {run.steps}\n")
            end_if(run.rank, run.steps, "after")
        run.log(epoch=epoch, loss=run.mean(loss.item()))


if __name__ == "__main__":
    main()

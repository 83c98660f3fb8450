"""The training that drills disturb: two epochs of four steps, saved after each, resumed if saved.

With `--layout` on the command line Farandole owns the step; otherwise the loop is the script's own.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import hooks
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import farandole as fd

TIMEOUT_SECONDS = 5.0
EPOCHS = 2
LAYOUT = os.environ.get("FARANDOLE_LAYOUT")


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(2, 2, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 2),
    )


def dataset() -> TensorDataset:
    x = torch.arange(16 * 64.0).reshape(16, 1, 8, 8).sin()
    return TensorDataset(x, torch.arange(16) % 2)


def optimizer(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05, momentum=0.9)  # type: ignore[arg-type]


def spoilt(x: torch.Tensor, epoch: int, count: int) -> torch.Tensor:
    """In the second epoch, so that a finite checkpoint is there to keep."""
    wanted = os.environ.get(hooks.NAN) == str(hooks.rank())
    return x * float("nan") if wanted and (epoch, count) == (1, 1) else x


def hold_in_saves() -> None:
    """A save is under way when it syncs its first file."""
    sync = os.fsync

    def held(descriptor: int) -> None:
        hooks.reach("saving")
        sync(descriptor)

    os.fsync = held


def main() -> None:
    hooks.reach("set-up")
    optimizer([torch.zeros(1)])  # imports what torch leaves for later
    hooks.meet(int(os.environ.get("WORLD_SIZE", "1")))
    run = fd.init(timeout=TIMEOUT_SECONDS)
    hold_in_saves()
    workers = 1 if os.environ.get(hooks.LOADER) else 0
    if LAYOUT:
        trainer = run.trainer(network(), F.cross_entropy, optimizer, sample=dataset()[:4][0])
        loader = trainer.loader(dataset(), batch_size=4)
        step = trainer.step
    else:
        model = network()
        model, opt = run.distribute(model, optimizer(model.parameters()))
        loader = run.loader(dataset(), global_batch_size=4, num_workers=workers)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            run.observe_loss(loss)
            opt.step()
            return loss.detach()

    if os.environ.get(hooks.STOPPED):
        run.save_when_stopped()
    run.load()
    for epoch in run.epochs(EPOCHS):
        loss = torch.zeros(())
        for count, (x, y) in enumerate(loader):
            hooks.reach("first step")
            if count == 2:
                hooks.reach("training")
            loss = step(spoilt(x, epoch, count), y)
            hooks.stepped()
        hooks.reach("collective")
        mean = run.mean(float(loss))
        hooks.reach("evaluation")  # rank 0 does it alone; the others wait for it in the next line
        run.log(epoch=epoch, loss=mean, accuracy=run.mean(0.5 + 0.1 * epoch))
        run.save()
        hooks.reach("between epochs")


main()
hooks.reach("finished")

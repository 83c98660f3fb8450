"""Trains in float64; each worker writes down what it reads, and some end in the middle of it.

    killed.py WORKER:STEP:WHERE …      where: forward, backward, step

With REPLACES in the environment it goes on until there are four workers again.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import farandole as fd

WORKER = os.environ.get("FARANDOLE_ELASTIC_WORKER", "")
DOOMED = [word.split(":") for word in sys.argv[1:] if word.count(":") == 2] if WORKER else []
LAST = 5 + max((int(step) for _, step, _ in DOOMED), default=0)
REPLACES = "REPLACES" in os.environ


def item(index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    x = torch.randn(4, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
    return x, x.sum().tanh().reshape(1), index


def new_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1)).double()


def new_optimizer(model: nn.Module) -> tuple[torch.optim.Optimizer, StepLR]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return optimizer, StepLR(optimizer, 3, 0.8)


def main() -> None:
    run = fd.init(timeout=100)

    def end_if(where: str) -> None:
        if [WORKER, str(run.steps), where] in DOOMED:
            os.kill(os.getpid(), signal.SIGKILL)

    plain = new_model()
    optimizer, scheduler = new_optimizer(plain)
    model, optimizer = run.distribute(plain, optimizer)
    # The first layer's gradient is the last to come: other buckets are averaged by then.
    plain[0].weight.register_post_accumulate_grad_hook(lambda _: end_if("backward"))
    if REPLACES:  # what came before the training, a newcomer is told
        assert run.sum(1.0) == 4.0
        assert run.load() is None
    data = [item(index) for index in range(47)]
    with Path(f"used-{WORKER}").open("a") as used:
        for epoch in run.epochs(100_000):
            if REPLACES:
                began = run.sum(1.0)
            for x, y, indices in run.loader(data, batch_size=2):
                if run.size < 4 and REPLACES:
                    time.sleep(0.05)
                optimizer.zero_grad()
                loss = (model(x) - y).pow(2).mean()
                used.write(json.dumps([run.steps, epoch, indices.tolist()]) + "\n")
                used.flush()
                end_if("forward")
                loss.backward()
                end_if("step")
                optimizer.step()
                scheduler.step()
            mean = run.mean(loss.item(), weight=len(x))
            if REPLACES:
                run.log(epoch=epoch, loss=mean, size=run.size, began=began)
                run.save(note=epoch)
            # The same on all ranks, also on one that has just come.
            if run.steps > LAST and (run.size == 4 or not REPLACES):
                break
    torch.save([run.samples, *model.parameters()], f"weights-{WORKER}")


if __name__ == "__main__":
    main()

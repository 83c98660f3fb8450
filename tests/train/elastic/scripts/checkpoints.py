"""The training of killed.py with automatic checkpoints, and without a scheduler.

    checkpoints.py LAST WORKER:STEP …      each worker ends before that step, for good

Each worker writes down what it reads. The training ends after step LAST; with WHOLE in the
environment, not before there are so many workers.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from killed import WORKER, item, new_model

import farandole as fd

LAST = int(sys.argv[1])
DOOMED = sys.argv[2:]
WHOLE = int(os.environ.get("WHOLE", 0))


def main() -> None:
    run = fd.init(timeout=100)
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    model, optimizer = run.distribute(model, optimizer)
    data = [item(index) for index in range(47)]
    with Path(f"used-{WORKER}").open("a") as used:
        for epoch in run.epochs(100_000):
            for x, y, indices in run.loader(data, batch_size=2):
                if f"{WORKER}:{run.steps}" in DOOMED:
                    os.kill(os.getpid(), signal.SIGKILL)
                if run.size < WHOLE:
                    time.sleep(0.05)
                optimizer.zero_grad()
                loss = (model(x) - y).pow(2).mean()
                used.write(json.dumps([run.steps, epoch, indices.tolist()]) + "\n")
                used.flush()
                loss.backward()
                optimizer.step()
            run.log(epoch=epoch, loss=run.mean(loss.item()))
            if run.steps > LAST and run.size >= WHOLE:
                break
    torch.save([run.samples, *model.parameters()], f"weights-{WORKER}")


if __name__ == "__main__":
    main()

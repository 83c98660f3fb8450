"""The training of killed.py, on hosts that come and go, until there is a file `finish`.

Each worker also writes down where it is: `place-WORKER` holds its host and its process.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
from killed import WORKER, item, new_model, new_optimizer

import farandole as fd


def main() -> None:
    run = fd.init(timeout=100)
    Path(f"place-{WORKER}").write_text(f"{os.uname().nodename} {os.getpid()}")
    plain = new_model()
    optimizer, scheduler = new_optimizer(plain)
    model, optimizer = run.distribute(plain, optimizer)
    data = [item(index) for index in range(47)]
    with Path(f"used-{WORKER}").open("a") as used:
        for epoch in run.epochs(100_000):
            for x, y, indices in run.loader(data, batch_size=2):
                time.sleep(0.02)
                optimizer.zero_grad()
                loss = (model(x) - y).pow(2).mean()
                used.write(json.dumps([run.steps, epoch, indices.tolist()]) + "\n")
                used.flush()
                loss.backward()
                optimizer.step()
                scheduler.step()
            run.log(epoch=epoch, size=run.size)
            if run.sum(float(Path("finish").exists())):
                break
    torch.save([run.samples, *model.parameters()], f"weights-{WORKER}")


if __name__ == "__main__":
    main()

"""Trains on shards with loading processes, saves after five steps, and writes down what it reads.

reads_shards.py PATTERN [STEP]      rank 1 is killed in this step
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import farandole as fd

PATTERN = sys.argv[1]
DOOMED = int(sys.argv[2]) if len(sys.argv) > 2 else None


def decode(sample: dict[str, int]) -> int:
    return sample["n"]


def main() -> None:
    run = fd.init(timeout=100)
    model = nn.Linear(1, 1)
    model, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), 1e-6))
    dataset = fd.data.shards(PATTERN, transform=decode, window=2, chunk_bytes=100)
    run.load()
    with Path(f"used-{run.size}-{run.rank}").open("a") as used:
        for _ in run.epochs(1):
            for numbers in run.loader(dataset, batch_size=3, num_workers=1):
                used.write(json.dumps([run.steps, numbers.tolist()]) + "\n")
                used.flush()
                optimizer.zero_grad()
                model(numbers[:, None].float()).mean().backward()
                if run.steps == DOOMED and run.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()
                if run.steps == 5:
                    run.save()


if __name__ == "__main__":
    main()

"""Never ends: rank 0 waits in a collective for rank 1, which waits for its own children."""

import os
import subprocess
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import farandole as fd

run = fd.init()
pids = [os.getpid()]
if run.rank == 1:
    batches = iter(DataLoader(TensorDataset(torch.zeros(100, 1)), num_workers=1))
    next(batches)
    pids += [worker.pid for worker in batches._workers]
    sleeper = subprocess.Popen(["sleep", "600"])
    pids.append(sleeper.pid)
ready = Path(f"ready-{run.rank}")
ready.with_suffix(".half").write_text(" ".join(map(str, pids)))
ready.with_suffix(".half").rename(ready)
if run.rank == 1:
    sleeper.wait()
run.group.barrier()

"""Trains on an HDF5 file that need not fit in memory: each worker reads its own chunks, once.

farandole run -n 2 examples/large_array.py
"""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import torch
from torch import nn

import farandole as fd

ROWS, WIDTH, WINDOW = 4000, 32, 4
CHUNK_BYTES = 32 << 10  # of such a small file: by default some MiB are read at once
FILE = Path("signals.h5")


def write() -> None:
    """In chunks of 100 rows, as a measurement would."""
    random = np.random.default_rng(0)
    signals = random.standard_normal((ROWS, WIDTH)).astype(np.float32)
    with h5py.File(FILE, "w") as file:
        file.create_dataset("signals", data=signals, chunks=(100, WIDTH), compression="gzip")
        file.create_dataset("power", data=signals @ np.linspace(-1, 1, WIDTH, dtype=np.float32))


def main() -> None:
    run = fd.init()
    if run.rank == 0:
        write()
    run.group.barrier()
    data = fd.data.array(FILE, "signals", "power", window=WINDOW, chunk_bytes=CHUNK_BYTES)
    model = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    model, optimizer = run.distribute(model, optimizer)
    for epoch in run.epochs(2):
        total, before = 0.0, data.chunks_read
        for signals, power in run.loader(data, batch_size=50):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(signals).squeeze(1), power)
            loss.backward()
            optimizer.step()
            total += loss.item()
        run.log(epoch=epoch, loss=run.mean(total))
        read, there = data.chunks_read - before, len(data.chunk_sizes)
        run.print(f"read {read} of {there} chunks with {WINDOW} at hand")


if __name__ == "__main__":
    main()

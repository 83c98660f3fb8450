"""Trains on an HDF5 file of four times the memory that the process may take.

    farandole run -n 2 examples/large_array.py

Each worker reads its own chunks, once in an epoch, in the background. The limit is real: a worker
that takes more memory than that fails.
"""

from __future__ import annotations

import resource
from pathlib import Path

import h5py
import numpy as np
import torch
from torch import nn

import farandole as fd

MIB = 2**20
LIMIT = 64 * MIB  # beyond what the process has before it reads
ROWS, WIDTH = 8192, 8192  # 256 MiB
FILE = Path("signals.h5")


def write() -> None:
    """In chunks of 32 rows, 1 MiB, as a measurement would."""
    random = np.random.default_rng(0)
    some = random.standard_normal((512, WIDTH), dtype=np.float32)
    weights = np.linspace(-1, 1, WIDTH, dtype=np.float32) / WIDTH**0.5
    with h5py.File(FILE, "w") as file:
        shape = {"shape": (ROWS, WIDTH), "dtype": np.float32}
        signals = file.create_dataset("signals", chunks=(32, WIDTH), **shape)
        power = file.create_dataset("power", shape=(ROWS,), dtype=np.float32)
        for begin in range(0, ROWS, 512):
            part = random.permutation(some)
            signals[begin : begin + 512] = part
            power[begin : begin + 512] = part @ weights


def limit_memory() -> None:
    """Of this process, to what it has now and so much more. (Linux)"""
    status = Path("/proc/self/status").read_text().splitlines()
    used = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + LIMIT, used + LIMIT))


def main() -> None:
    torch.set_num_threads(1)
    run = fd.init()
    if run.rank == 0:
        write()
    run.group.barrier()
    data = fd.data.array(FILE, "signals", "power", chunk_bytes=MIB, memory_bytes=8 * MIB)
    model = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.005)
    model, optimizer = run.distribute(model, optimizer)
    limit_memory()
    for epoch in run.epochs(2):
        total, before = 0.0, data.chunks_read
        for signals, power in run.loader(data, batch_size=64):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(signals).squeeze(1), power)
            loss.backward()
            optimizer.step()
            total += loss.item()
        run.log(epoch=epoch, loss=run.mean(total))
        read, there = data.chunks_read - before, len(data.chunk_sizes)
        run.print(f"read {read} of {there} chunks with {data.window + data.ahead} at hand")
    run.print(f"{FILE.stat().st_size / LIMIT:.1f} times the memory that was allowed")


if __name__ == "__main__":
    main()

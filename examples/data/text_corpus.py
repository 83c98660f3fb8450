"""Trains on a corpus of text files: lines are the samples, and each worker reads its own parts.

    farandole run -n 2 examples/data/text_corpus.py

The example first writes a small corpus. The model learns which character follows which.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import farandole as fd

FILES, LINES, LENGTH, CHARACTERS = 4, 300, 32, 128
WORDS = ("chain", "dance", "many", "dancers", "hand in hand", "one figure", "led by the first")


def write_corpus() -> None:
    for number in range(FILES):
        draw = random.Random(number)
        lines = (" ".join(draw.choices(WORDS, k=draw.randint(6, 12))) for _ in range(LINES))
        Path(f"corpus-{number}.txt").write_text("\n".join(lines) + "\n")


def encode(line: str) -> torch.Tensor:
    """The first characters as numbers; 0 after the end of a short line."""
    codes = [min(ord(character), CHARACTERS - 1) for character in line[: LENGTH + 1]]
    return torch.tensor(codes + [0] * (LENGTH + 1 - len(codes)))


def main() -> None:
    run = fd.init()
    if run.rank == 0:
        write_corpus()
    run.group.barrier()
    corpus = fd.data.shards("corpus-*.txt", transform=encode, chunk_bytes=4096, window=4)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(CHARACTERS, 32), nn.Linear(32, CHARACTERS))
    model, optimizer = run.distribute(model, torch.optim.Adam(model.parameters(), 0.01))
    for epoch in run.epochs(2):
        total, steps = 0.0, 0
        for lines in run.loader(corpus, batch_size=25):
            optimizer.zero_grad()
            logits = model(lines[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), lines[:, 1:].flatten(), ignore_index=0)
            loss.backward()
            optimizer.step()
            total, steps = total + loss.item(), steps + 1
        run.log(epoch=epoch, loss=run.mean(total / steps))
    run.print(f"{len(corpus)} lines in {len(corpus.chunk_sizes)} chunks")


if __name__ == "__main__":
    main()

"""Trains on a folder of images: the files are packed into shards once, and read from those.

    farandole run -n 2 examples/data/image_folder.py

The example first makes the folder: a sub-folder for each class, with pictures of 16² pixels in the
plainest format there is (PPM). Pictures of one class are brighter on the left, of the other at the
top. `farandole pack images shards` then makes shards; a real folder needs that once, by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import farandole as fd
from farandole.cli import commands

SIDE, IMAGES = 16, 120  # of each class


def make_folder(folder: Path) -> None:
    random = np.random.default_rng(0)
    ramp = np.linspace(0, 100, SIDE)
    for name, light in (("left", ramp[::-1][None, :, None]), ("top", ramp[::-1][:, None, None])):
        (folder / name).mkdir(parents=True)
        for number in range(IMAGES):
            image = (random.integers(0, 100, (SIDE, SIDE, 3)) + light).astype(np.uint8)
            header = f"P6 {SIDE} {SIDE} 255\n".encode()
            (folder / name / f"{number}.ppm").write_bytes(header + image.tobytes())


def decode(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Of a sample of the shard: the picture as its file had it, and the number of its class."""
    pixels = np.frombuffer(sample["ppm"].partition(b"\n")[2], np.uint8)
    image = torch.from_numpy(pixels.reshape(SIDE, SIDE, 3).copy())
    return image.permute(2, 0, 1).float() / 255, sample["cls"]


def main() -> None:
    run = fd.init()
    if run.rank == 0:
        make_folder(Path("images"))
        pack = ["pack", "images", "shards", "--samples", "50"]  # as on the command line
        commands(pack, standalone_mode=False)
    run.group.barrier()
    data = fd.data.shards("shards/*.tar", transform=decode)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, 2))
    model, optimizer = run.distribute(model, torch.optim.Adam(model.parameters(), 0.005))
    for epoch in run.epochs(3):
        right = seen = 0.0
        loader = run.loader(data, batch_size=20)
        for x, y in loader:
            optimizer.zero_grad()
            logits = model(x)
            F.cross_entropy(logits, y).backward()
            optimizer.step()
            right += float((logits.argmax(1) == y).sum())
            seen += len(y)
        run.log(epoch=epoch, accuracy=run.sum(right) / run.sum(seen))
    run.print(f"{len(data)} images of {len(data.sources)} shards")


if __name__ == "__main__":
    main()

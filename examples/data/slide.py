"""Trains on whole slides of 20,000² pixels: each worker decodes its own part of every slide.

    farandole run -n 4 --layout tiles=2x2 examples/data/slide.py
    farandole run -n 2 --layout tiles=2x1 examples/data/slide.py --size 4096

The example first makes two slides, as scanners write them: in compressed tiles of 1,024², with a
second level of an eighth of the size, and nothing where there is no tissue. On one of them the
tissue is striped. The model learns which.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import farandole as fd

TILE = 1024

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--size", type=int, default=20_000, help="rows and columns of a slide")
parser.add_argument("--level", type=int, default=0, help="1 is an eighth of the size")
parser.add_argument("--epochs", type=int, default=1)


def tissue(size: int, striped: bool) -> Iterator[np.ndarray[Any, Any] | None]:
    """The tiles of a slide, row by row; None is one that is not written."""
    edge = -(-size // TILE)
    pattern = np.full((TILE, TILE), 128, np.uint8)
    pattern[:, :: 16 if striped else TILE] = 255
    for number in range(edge * edge):
        row, column = divmod(number, edge)
        inside = (row - edge / 2) ** 2 + (column - edge / 2) ** 2 < (edge / 4) ** 2
        yield pattern if inside or number == 0 else None  # the first one tells the library the kind


def write(path: Path, size: int, striped: bool) -> None:
    small = np.full((size // 8, size // 8), 200 if striped else 100, np.uint8)
    options: dict[str, Any] = {
        "tile": (TILE, TILE),
        "compression": "zlib",
        "photometric": "minisblack",
        "metadata": None,
    }
    with tifffile.TiffWriter(path, bigtiff=True) as file:
        shape = {"shape": (size, size), "dtype": np.uint8}
        file.write(tissue(size, striped), subifds=1, **shape, **options)
        file.write(small, subfiletype=1, **options)


class Brightness(nn.Module):
    """Converts bytes in the model, as late as it can: a float takes four times the memory."""

    def forward(self, image: Tensor) -> Tensor:
        return image.float() / 255


def main() -> None:
    args = parser.parse_args()
    run = fd.init()
    if run.rank == 0:
        for number in range(2):
            write(Path(f"slide-{number}.tif"), args.size, striped=number == 1)
    run.group.barrier()
    slides = fd.data.slides("slide-{0,1}.tif", level=args.level, labels=[0, 1])
    model = nn.Sequential(
        nn.MaxPool2d(16),
        Brightness(),
        nn.Conv2d(1, 4, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 2),
    )
    trainer = run.trainer(model, F.cross_entropy, lambda ps: torch.optim.Adam(ps, 0.02))
    for epoch in run.epochs(args.epochs):
        for x, y in trainer.loader(slides, global_batch_size=1):
            loss = trainer.step(x, y)
        run.log(epoch=epoch, loss=loss.item())
    there = args.epochs * len(slides) * slides.image_size[0] * slides.image_size[1]
    run.print(f"rank 0 read {slides.pixels_read} of {there} pixels")


if __name__ == "__main__":
    main()

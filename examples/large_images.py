"""Images too large for one worker: each worker reads and trains on its tile of every image.

    farandole run -n 4 examples/large_images.py                          4 images of 16,384²
    farandole run -n 4 examples/large_images.py --size 1024 --images 16  16 smaller ones
    farandole run -n 2 --layout tiles=2x1 examples/large_images.py       an upper and a lower half
    farandole run -n 4 --layout tiles=2x1 examples/large_images.py       2 replicas of that
    python examples/large_images.py --size 1024 --images 16              alone, tiles in turn

The example first creates the images, 256 MiB each at full size, and keeps them for the next run.
The stripes of an image run along its rows or its columns, under much noise. The model learns which.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import farandole as fd

ROWS_AT_ONCE = 256
MIB = 2**20

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--size", type=int, default=16_384, help="rows and columns of an image")
parser.add_argument("--images", type=int, default=4)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch", type=int, default=2, help="over all replicas together")
parser.add_argument("--rate", type=float, default=0.01)
parser.add_argument("--folder", type=Path, default=Path("runs/large_images"))
args = parser.parse_args()


def make_images(path: Path, images: int, size: int) -> None:
    """Writes some rows at a time, so that no image is ever in memory. Renames the complete file."""
    unfinished = path.with_suffix(".part")
    stored = np.lib.format.open_memmap(unfinished, "w+", np.uint8, (images, 1, size, size))
    for index in range(images):
        random = np.random.default_rng(index)
        for first in range(0, size, ROWS_AT_ONCE):
            band = stored[index, 0, first : first + ROWS_AT_ONCE]
            rows, columns = np.indices(band.shape, dtype=np.int32, sparse=True)
            grain = (rows + first if index % 2 else columns) // 8 % 2
            band[:] = random.integers(0, 192, band.shape, np.uint8)
            band += (64 * grain).astype(np.uint8)
    stored.flush()
    unfinished.rename(path)


class StoredImages:
    """Images in one file. Farandole calls `tile` to read a part of an image."""

    def __init__(self, path: Path) -> None:
        self._stored = np.load(path, mmap_mode="r")
        self.image_size = self._stored.shape[2:]
        self.bytes_read = 0

    def __len__(self) -> int:
        return len(self._stored)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.tile(index, tuple(slice(0, size) for size in self.image_size))

    def tile(self, index: int, box: tuple[slice, ...]) -> tuple[Tensor, int]:
        """The pixels in the box, and the label of the whole image."""
        image = np.array(self._stored[(index, slice(None), *box)])
        self.bytes_read += image.nbytes
        return torch.from_numpy(image), index % 2


class Brightness(nn.Module):
    """Converts bytes to floats around 0. This is in the model, so that only bytes are read."""

    def forward(self, image: Tensor) -> Tensor:
        return image.float() / 128 - 1


def classifier() -> nn.Sequential:
    """A plain model. It contains nothing about tiles."""
    return nn.Sequential(
        Brightness(),
        nn.Conv2d(1, 8, 5, stride=4, padding=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 5, stride=4, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 2),
    )


run = fd.init()
path = args.folder / f"{args.images}x{args.size}.npy"
if run.rank == 0 and not path.exists():
    args.folder.mkdir(parents=True, exist_ok=True)
    make_images(path, args.images, args.size)
run.sum(0.0)  # all ranks wait here until the file exists
images = StoredImages(path)

if run.size % 4 == 0:
    layout = fd.Layout(tiles=(2, 2))
elif run.size > 1:
    layout = fd.Layout(tiles=(run.size, 1))
else:  # activations are recomputed layer by layer in the backward pass
    layout = fd.Layout(tiles=(2, 2), in_turn=True, recompute=True, recompute_blocks=1)
trainer = run.trainer(
    classifier(),
    F.cross_entropy,
    lambda parameters: torch.optim.Adam(parameters, lr=args.rate),
    layout=layout,  # --layout takes precedence
)


@torch.no_grad()
def accuracy() -> float:
    correct = seen = 0.0
    for x, y in trainer.loader(images, global_batch_size=args.batch, shuffle=False):
        correct += float((trainer.predict(x).argmax(dim=1) == y).sum())
        seen += len(y)
    # All ranks of a replica count the same images, so `seen` is summed as well.
    return run.sum(correct) / run.sum(seen)


for epoch in run.epochs(args.epochs):
    for x, y in trainer.loader(images, global_batch_size=args.batch):
        loss = trainer.step(x, y)
    run.log(epoch=epoch, loss=run.mean(loss.item()), accuracy=accuracy())

passes = 2 * args.epochs  # training and evaluation
print(
    f"rank {run.rank} has read {images.bytes_read / passes / MIB:.3g} MiB in each pass over "
    f"{len(images)} images, which have {path.stat().st_size / MIB:.3g} MiB"
)

"""Fashion-MNIST with the large-batch recipe: the learning rate follows the number of workers.

    farandole run -n 2 examples/fashion_mnist.py --epochs 3
    farandole run -n 2 --name fashion examples/fashion_mnist.py    stop it with Ctrl-C, then resume

The example reads the four files of Debian's package dataset-fashion-mnist (apt install
dataset-fashion-mnist), or the same files in the folder given with --data.
"""

import argparse
import gzip
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, TensorDataset

import farandole as fd
from farandole.models import build

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch", type=int, default=64, help="per worker")
parser.add_argument("--samples", type=int, help="number of samples to use [all]")
args = parser.parse_args()


def read(kind: str) -> Dataset:
    """The training or the test set. Each file has a short header, followed by bytes."""
    images, labels = (
        args.data / f"{kind}-{name}-ubyte.gz" for name in ("images-idx3", "labels-idx1")
    )
    if not images.exists() or not labels.exists():
        sys.exit(
            f"Fashion-MNIST is not in {args.data}. On Debian: apt install dataset-fashion-mnist; "
            "elsewhere pass --data with the folder that holds the four .gz files."
        )
    pixels = np.frombuffer(gzip.decompress(images.read_bytes()), np.uint8, offset=16)
    classes = np.frombuffer(gzip.decompress(labels.read_bytes()), np.uint8, offset=8)
    x = torch.tensor(pixels.reshape(-1, 1, 28, 28), dtype=torch.float32) / 255
    y = torch.tensor(classes, dtype=torch.int64)
    return TensorDataset(x[: args.samples], y[: args.samples])


train, test = read("train"), read("t10k")
run = fd.init()

model = build("small_cnn", classes=10, image_size=28, channels=1)
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
model, opt = run.distribute(model, opt)
loader = run.loader(train, batch_size=args.batch)
recipe = fd.LargeBatch(base_rate=0.05, base_batch=64, warmup_epochs=0.5)
schedule = recipe.apply(
    opt, global_batch=args.batch * run.size, steps_per_epoch=len(loader), epochs=args.epochs
)
if state := run.load():  # resumes a run of the same --name
    schedule.load_state_dict(state["schedule"])
# On SIGTERM, or SIGUSR1 from Slurm, all ranks save at the end of the same step, and exit.
run.save_when_stopped(state=lambda: {"schedule": schedule.state_dict()})


@torch.no_grad()
def accuracy() -> float:
    model.eval()
    correct = 0.0
    for x, y in run.loader(test, batch_size=500, shuffle=False):
        correct += float((model(x).argmax(dim=1) == y).sum())
    model.train()
    return run.sum(correct) / len(test)


for epoch in run.epochs(args.epochs):
    for x, y in loader:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        schedule.step()
    run.log(epoch=epoch, loss=run.mean(loss.item()), accuracy=accuracy())
    run.save(background=True, schedule=schedule.state_dict())  # the next epoch does not wait

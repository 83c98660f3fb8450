"""Digits with choices that are left open: `farandole tune` finds the best.

    python examples/tune.py                                       alone, with its defaults
    farandole tune --trials 20 --metric accuracy examples/tune.py
    farandole tune --trials 20 --metric accuracy --ensemble 5 examples/tune.py
    farandole tune -n 2 --trials 20 --metric accuracy --sync allreduce --sync local:every=4 \\
                   examples/tune.py

The data ship with scikit-learn: 1,797 images of 8×8.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import farandole as fd
from farandole.optim import LargeBatch

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=10)
args = parser.parse_args()

run = fd.init()

rate = run.choose("rate", 1e-3, 0.5, log=True)  # for a batch of 32
batch = run.choose("batch", [32, 64, 128])  # over all workers together
width = run.choose("width", 16, 128, log=True, structure=True)
if run.choose("optimizer", ["sgd", "adam"]) == "sgd":
    momentum = run.choose("momentum", 0.0, 0.95, default=0.9)
else:
    momentum = None

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
train = TensorDataset(images[order[360:]], labels[order[360:]])
test = TensorDataset(images[order[:360]], labels[order[:360]])

model: nn.Module = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
opt: torch.optim.Optimizer
if momentum is None:
    opt = torch.optim.Adam(model.parameters(), lr=rate / 10)
    recipe = LargeBatch(rate / 10, 32, rule="sqrt", warmup_epochs=1)
else:
    opt = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
    recipe = LargeBatch(rate, 32, rule="linear", warmup_epochs=1)
# The rate goes with the batch: what is searched for is the rate of a small batch.
steps = -(-len(train) // batch)
scheduler = recipe.apply(opt, global_batch=batch, steps_per_epoch=steps, epochs=args.epochs)
model, opt = run.distribute(model, opt)


@torch.no_grad()
def predict() -> tuple[torch.Tensor, torch.Tensor]:
    """Of this rank's share of the test data."""
    model.eval()
    found = [(model(x).softmax(dim=1), y) for x, y in run.loader(test, 90, shuffle=False)]
    model.train()
    return torch.cat([rows for rows, _ in found]), torch.cat([truth for _, truth in found])


for epoch in run.epochs(args.epochs):
    for x, y in run.loader(train, global_batch_size=batch):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
        scheduler.step()
    probabilities, truth = predict()
    correct = (probabilities.argmax(dim=1) == truth).sum()
    run.log(epoch=epoch, accuracy=run.sum(float(correct)) / len(test))
run.predictions(probabilities, truth)

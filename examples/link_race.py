"""Hand-written digits with a model whose gradients are large: a race that the link decides.

    make race
    python examples/link_race.py                                                       alone
    farandole run -n 2 --pretend-hosts 2 --link 200mbit,1ms --sync daso examples/link_race.py

One script for all schemes: strategies, parameter servers and pipelines. The gradients of a step
are 1.2 MB, which take 50 ms over a link of 200 Mbit/s, and far less to compute.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import farandole as fd
from farandole.models import mlp

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--batch", type=int, default=64, help="over all replicas together")
parser.add_argument("--rate", type=float, default=0.05)
parser.add_argument("--width", type=int, default=512, help="of the two hidden layers")
args = parser.parse_args()

run = fd.init()

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels))  # the same on every rank, because fd.init() seeds torch
train = TensorDataset(images[order[360:]], labels[order[360:]])
test = TensorDataset(images[order[:360]], labels[order[:360]])

trainer = run.trainer(
    mlp(classes=10, image_size=8, channels=1, hidden=(args.width, args.width)),
    F.cross_entropy,
    lambda parameters: torch.optim.SGD(parameters, lr=args.rate, momentum=0.9),
)


@torch.no_grad()
def accuracy() -> float:
    correct = seen = 0.0
    for x, y in trainer.loader(test, batch_size=90, shuffle=False):
        correct += float((trainer.predict(x).argmax(dim=1) == y).sum())
        seen += len(y)
    # All ranks of a replica count the same samples, so `seen` is summed as well.
    return run.sum(correct) / run.sum(seen)


for epoch in run.epochs(args.epochs):
    for x, y in trainer.loader(train, global_batch_size=args.batch):
        loss = trainer.step(x, y)
    run.log(epoch=epoch, loss=run.mean(loss.item()), accuracy=accuracy())

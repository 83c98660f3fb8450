"""Hand-written digits with a convolutional network: a race between computing and the link.

    make race
    python examples/link_race.py                                                       alone
    farandole run -n 2 --pretend-hosts 2 --link 200mbit,1ms --sync daso examples/link_race.py

One script for all schemes: strategies, parameter servers and pipelines. A convolutional network has
much to compute for each of its parameters: the gradients of a step are 0.34 MB, which take 14 ms
over a link of 200 Mbit/s, about half of what one core needs to compute them for half of the batch.
Adam suits all of them with one learning rate: with momentum, gradients that come a step late, as
under `lagged`, need a much smaller one.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import farandole as fd

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--batch", type=int, default=64, help="over all replicas together")
parser.add_argument("--rate", type=float, default=0.001)
parser.add_argument("--channels", type=int, default=64, help="of the convolutions")
args = parser.parse_args()

torch.set_num_threads(1)  # one core for each worker: or the serial lane would have all of them
run = fd.init()

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels))  # the same on every rank, because fd.init() seeds torch
train = TensorDataset(images[order[360:]], labels[order[360:]])
test = TensorDataset(images[order[:360]], labels[order[:360]])


def network(channels: int) -> nn.Sequential:
    """On 8×8 pixels. No layer looks at other samples, so all ways to train compute the same."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(channels * 16, 10),
    )


trainer = run.trainer(
    network(args.channels),
    F.cross_entropy,
    lambda parameters: torch.optim.Adam(parameters, lr=args.rate),
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

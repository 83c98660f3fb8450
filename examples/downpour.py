"""Downpour SGD on parameter servers: replicas do not wait for each other.

    farandole run -n 4 --servers 2 --sync downpour:push=2,fetch=2,warmstart=10 examples/downpour.py
    farandole run -n 4 --servers 2 --sync server:staleness=4 examples/downpour.py
    python examples/downpour.py                    alone, with a server in a thread

Each worker takes its own steps. Every few steps it pushes the sum of its gradients to the servers
and fetches the parameters of the servers. You can kill any worker except rank 0, or one of the
servers, while the example runs: the others go on.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import farandole as fd
from farandole.models import build

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--batch", type=int, default=16, help="of each worker")
parser.add_argument("--rate", type=float, default=0.2)
args = parser.parse_args()

run = fd.init()

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels))  # the same on every rank, because fd.init() seeds torch
train = TensorDataset(images[order[360:]], labels[order[360:]])
test = TensorDataset(images[order[:360]], labels[order[:360]])

model = build("small_cnn", classes=10, image_size=8, channels=1)
# Workers take steps of SGD. The servers take steps of Adagrad, at `gain` times this rate.
opt = torch.optim.SGD(model.parameters(), lr=args.rate)
# The command line's --sync takes precedence over this strategy.
model, opt = run.distribute(model, opt, sync=fd.Downpour(push=2, fetch=2, warmstart=10))
run.load()  # resumes a run of the same --name


@torch.no_grad()
def accuracy() -> float:
    model.eval()
    correct = 0.0
    for x, y in run.loader(test, batch_size=90, shuffle=False):
        correct += float((model(x).argmax(dim=1) == y).sum())
    model.train()
    return run.sum(correct) / len(test)


for epoch in run.epochs(args.epochs):
    for x, y in run.loader(train, batch_size=args.batch):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
    # After a pass all workers have pushed their gradients and hold the servers' parameters.
    run.log(epoch=epoch, loss=run.mean(loss.item()), accuracy=accuracy())
    run.save()

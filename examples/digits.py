"""Hand-written digits on any number of workers: the smallest complete example.

    python examples/digits.py                      alone
    farandole run -n 2 examples/digits.py          two workers
    farandole race -n 2 --sync allreduce --serial --target accuracy=0.95 examples/digits.py

The data ship with scikit-learn: 1,797 images of 8×8.
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
parser.add_argument("--batch", type=int, default=64, help="over all workers together")
parser.add_argument("--rate", type=float, default=0.05)
args = parser.parse_args()

run = fd.init()

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels))  # the same on every rank, because fd.init() seeds torch
train = TensorDataset(images[order[360:]], labels[order[360:]])
test = TensorDataset(images[order[:360]], labels[order[:360]])

model = build("small_cnn", classes=10, image_size=8, channels=1)
opt = torch.optim.SGD(model.parameters(), lr=args.rate, momentum=0.9)
model, opt = run.distribute(model, opt)
run.load()  # resumes a run of the same --name


@torch.no_grad()
def accuracy() -> float:
    model.eval()
    correct = torch.tensor(0)
    for x, y in run.loader(test, batch_size=90, shuffle=False):
        correct += (model(x).argmax(dim=1) == y).sum().cpu()
    model.train()
    return run.sum(float(correct)) / len(test)


for epoch in run.epochs(args.epochs):
    for x, y in run.loader(train, global_batch_size=args.batch):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
    run.log(epoch=epoch, loss=run.mean(loss.item()), accuracy=accuracy())
    run.save()

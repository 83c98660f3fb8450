"""A model cut into stages, one on each worker. The script runs on any number of workers.

    python examples/pipeline.py                                                        alone
    farandole run -n 2 examples/pipeline.py                                            2 stages
    farandole run -n 2 --layout stages=2,schedule=pipedream examples/pipeline.py       no waiting
    farandole run -n 4 --layout stages=2,microbatches=4 examples/pipeline.py           2 replicas
    farandole race -n 2 --layout whole --layout stages=2,microbatches=4 --target accuracy=0.95 \
                   examples/pipeline.py

With --name, a second run resumes the first one, also under another layout.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import farandole as fd
from farandole.models import build

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch", type=int, default=64, help="over all replicas together")
parser.add_argument("--rate", type=float, default=0.05)
args = parser.parse_args()

run = fd.init()

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels))  # the same on every rank, because fd.init() seeds torch
train = TensorDataset(images[order[360:]], labels[order[360:]])
test = TensorDataset(images[order[:360]], labels[order[:360]])

trainer = run.trainer(
    build("small_cnn", classes=10, image_size=8, channels=1),
    F.cross_entropy,
    lambda parameters: torch.optim.SGD(parameters, lr=args.rate, momentum=0.9),
    layout=fd.Layout(stages=run.size, microbatches=4),  # --layout takes precedence
    sample=images[: args.batch],  # with a sample, the cut is measured
)
trainer.load()


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
    trainer.save()

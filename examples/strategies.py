"""One script that runs under every strategy, with everything that any of them needs.

    farandole run -n 2 --sync local:every=8 examples/strategies.py
    farandole run -n 2 --sync adacomm:start=16,steps=40 examples/strategies.py
    farandole run -n 4 --pretend-hosts 2 --sync daso examples/strategies.py

Lines that a strategy does not need do no harm under it. So you can race this script.
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
args = parser.parse_args()

run = fd.init()

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels))
train = TensorDataset(images[order[360:]], labels[order[360:]])
test = TensorDataset(images[order[:360]], labels[order[:360]])

model = build("small_cnn", classes=10, image_size=8, channels=1)
opt = torch.optim.AdamW(model.parameters(), lr=0.003)
# All strategies except allreduce act on the optimizer's steps, so the optimizer is distributed too.
# The command line's --sync takes precedence over this strategy.
model, opt = run.distribute(model, opt, sync=fd.Local(every=8))
# postlocal waits until the rate falls. A falling rate lengthens adacomm's period.
schedule = torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.8)
if state := run.load():  # bit for bit on the same number of workers
    schedule.load_state_dict(state["schedule"])


@torch.no_grad()
def accuracy() -> float:
    model.eval()
    correct = 0.0
    for x, y in run.loader(test, batch_size=90, shuffle=False):
        correct += float((model(x).argmax(dim=1) == y).sum())
    model.train()
    return run.sum(correct) / len(test)


# lagged and daso are synchronous at the start and the end of a run; run.epochs tells its length.
for epoch in run.epochs(args.epochs):
    # Replicas are averaged at the end of an epoch, which run.loader announces.
    for x, y in run.loader(train, global_batch_size=args.batch):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        run.observe_loss(loss)  # for adacomm and daso; before the step, which may synchronize ranks
        opt.step()
    schedule.step()  # the same on all ranks
    run.log(epoch=epoch, loss=run.mean(loss.item()), accuracy=accuracy())
    run.save(schedule=schedule.state_dict())  # saves the average where replicas differ

"""One script under every strategy: what each of them needs of it.

    farandole run -n 2 --sync local:every=8 examples/strategies.py
    farandole run -n 2 --sync adacomm:start=16,steps=40 examples/strategies.py
    farandole run -n 4 --hosts 2 --sync daso examples/strategies.py

Nothing here is for one strategy only, and none of it harms under another: a script that has these
lines can be raced.
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
# All but allreduce act on the optimizer's steps, so it is distributed with the model. What is said
# here is for a run without --sync: the command line wins.
model, opt = run.distribute(model, opt, sync=fd.Local(every=8))
# postlocal waits for the rate to fall, and a falling rate lengthens adacomm's period.
schedule = torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.8)
if state := run.load():  # to the bit, on as many workers, also where replicas differ
    schedule.load_state_dict(state["schedule"])


@torch.no_grad()
def accuracy() -> float:
    model.eval()
    correct = 0.0
    for x, y in run.loader(test, batch_size=90, shuffle=False):
        correct += float((model(x).argmax(dim=1) == y).sum())
    model.train()
    return run.sum(correct) / len(test)


# run.epochs knows how long the run is: lagged and daso are synchronous in its first and last part.
for epoch in run.epochs(args.epochs):
    # run.loader knows when an epoch ends: replicas that have trained alone are averaged there.
    for x, y in run.loader(train, global_batch_size=args.batch):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        run.observe_loss(
            loss
        )  # adacomm and daso steer by it; before the step, in which ranks may meet
        opt.step()
    schedule.step()  # alike on all ranks
    run.log(epoch=epoch, loss=run.mean(loss.item()), accuracy=accuracy())
    run.save(schedule=schedule.state_dict())  # between meetings too: then the average is saved

"""Training with Horovod that goes on when workers die, come or go.

    horovodrun -np 2 --min-np 1 --max-np 4 --host-discovery-script ./hosts.sh python elastic.py

hosts.sh prints the hosts that there are now, one a line, such as `localhost:4`.
"""

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--batch-size", type=int, default=32, help="per worker")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--lr", type=float, default=0.02, help="of one worker")
parser.add_argument("--batches-per-commit", type=int, default=5)
args = parser.parse_args()

hvd.init()
torch.manual_seed(42)

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels))
train_set = TensorDataset(images[order[360:]], labels[order[360:]])
test_images, test_labels = images[order[:360]], labels[order[:360]]

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
sampler = hvd.elastic.ElasticSampler(train_set)
loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)


def on_reset():
    """There may be more workers now, or fewer."""
    for group in optimizer.param_groups:
        group["lr"] = args.lr * hvd.size()


@hvd.elastic.run
def train(state):
    while state.epoch < args.epochs:
        for batch_idx, (data, target) in enumerate(loader):
            state.optimizer.zero_grad()
            F.cross_entropy(state.model(data), target).backward()
            state.optimizer.step()
            state.sampler.record_batch(batch_idx, args.batch_size)
            if (batch_idx + 1) % args.batches_per_commit == 0:
                state.commit()
        report(state.epoch)
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()


def report(epoch):
    with torch.no_grad():
        right = (model(test_images).argmax(1) == test_labels).float().mean().item()
    if hvd.rank() == 0:
        print(f"Epoch {epoch}, {hvd.size()} workers: accuracy {right:.2%}", flush=True)


state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)
state.register_reset_callbacks([on_reset])
train(state)

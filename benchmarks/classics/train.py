"""The script of the races: a dense network on Fashion-MNIST, which every strategy can train.

    farandole run -n 2 --pretend-hosts 2 --link 100mbit,1ms benchmarks/classics/train.py

A pass is a random part of the training set. Replicas are in step at its end, so the loss and the
error are taken there: the loss on a fixed part of the training set, the error on one of the test
set.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import farandole as fd

sys.path.insert(0, str(Path(__file__).parents[1]))
from fashion import read

SAMPLES = 30_000  # to train on
EVALUATED = 2000  # samples, of the training and of the test set


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 256, 256])
    parser.add_argument("--batch", type=int, default=64, help="over all replicas together")
    parser.add_argument("--steps", type=int, default=64, help="of a pass")
    parser.add_argument("--passes", type=int, default=20)
    parser.add_argument("--seconds", type=float, help="end after the pass in which they are over")
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--base-batch", type=int, help="the rate suits it; scale it to --batch")
    parser.add_argument("--warmup", type=float, default=0.0, help="passes, with --base-batch")
    parser.add_argument("--noise", type=float, default=0.0, help="share of labels drawn at random")
    parser.add_argument("--pause", type=float, default=0.0, help="milliseconds of a slow step")
    parser.add_argument("--slow", type=float, default=0.1, help="share of steps with --pause")
    return parser.parse_args()


def network(hidden: list[int]) -> nn.Sequential:
    sizes = [784, *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for narrow, wide in pairwise(sizes):
        layers += [nn.Linear(narrow, wide), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 10))


def noisy(labels: torch.Tensor, share: float) -> torch.Tensor:
    drawn = torch.randint(0, 10, labels.shape)
    return torch.where(torch.rand(labels.shape) < share, drawn, labels)


args = options()
torch.set_num_threads(1)  # one core for each worker: or the serial lane would have all of them
# Before fd.init(), where the clock of the run starts.
images, labels = read(args.data, "train", SAMPLES).tensors
tested = read(args.data, "t10k", EVALUATED)
run = fd.init()
labels = noisy(labels, args.noise)  # the same on every rank, because fd.init() seeds torch
fixed = TensorDataset(images[:EVALUATED], labels[:EVALUATED])
made: list[torch.optim.SGD] = []


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.SGD:
    made.append(torch.optim.SGD(parameters, lr=args.rate, momentum=args.momentum))
    return made[0]


trainer = run.trainer(network(args.hidden), F.cross_entropy, optimizer, sample=images[:8])
schedule = None
if args.base_batch is not None:
    schedule = fd.LargeBatch(args.rate, args.base_batch, args.warmup, decay="constant").apply(
        made[0], global_batch=args.batch, steps_per_epoch=args.steps, epochs=args.passes
    )


@torch.no_grad()
def evaluate(data: TensorDataset) -> tuple[float, float]:
    """Mean loss, and share of errors."""
    loss = wrong = seen = 0.0
    for x, y in trainer.loader(data, batch_size=250, shuffle=False):
        scores = trainer.predict(x)
        loss += float(F.cross_entropy(scores, y, reduction="sum"))
        wrong += float((scores.argmax(dim=1) != y).sum())
        seen += len(y)
    # All ranks of a replica count the same samples, so `seen` is summed as well.
    loss, wrong, seen = (run.sum(number) for number in (loss, wrong, seen))
    return loss / seen, wrong / seen


# The k-th step of everybody is slow for one of the ranks, which is drawn at random.
slow = random.Random(run.seed)
began = time.monotonic()
for _ in run.epochs(args.passes):
    chosen = torch.randperm(len(labels))[: args.steps * args.batch]
    part = TensorDataset(images[chosen], labels[chosen])
    for x, y in trainer.loader(part, global_batch_size=args.batch):
        draw, rank = slow.random(), slow.randrange(run.size)
        if args.pause and draw < args.slow and rank == run.rank:
            time.sleep(args.pause / 1000)
        trainer.step(x, y)
        if schedule is not None:
            schedule.step()
    loss, _ = evaluate(fixed)
    test_loss, error = evaluate(tested)
    run.log(loss=loss, test_loss=test_loss, error=error)
    if args.seconds and run.mean(time.monotonic() - began) > args.seconds:
        break

"""What every strategy must do on hand-written digits; as a module, and as a script on real ranks.

farandole run -n 4 --pretend-hosts 2 conform.py FOLDER       writes FOLDER/<rank>.json
"""

from __future__ import annotations

import dataclasses
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import farandole as fd
from farandole.sync import Strategy, parse
from farandole.topology import Topology
from farandole.train import Run
from farandole.train.settings import Settings

REPEATABLE = (
    "allreduce",
    "lagged:steps=4",
    "local:every=8",
    "local:every=8,momentum=0.3,moments=average",
    "local:every=4,codec=int8",
    "postlocal:every=4",
    "adacomm:start=16,steps=40",
    "diloco:every=20",
    "federated:every=4,fraction=0.75",
    "daso",
    "daso:every=2,codec=bf16",
)
SERVED = ("server",)  # as repeatable, by a server that rank 0 keeps for the ranks of its host
LOCK_FREE = (  # on one host only, and no two runs of them are the same
    "hogwild",
    "server:staleness=2",
    "server:async,update=worker",
    "downpour:push=2,fetch=2",
)
STRATEGIES = (*REPEATABLE, *SERVED, *LOCK_FREE)
HELD_OUT = 360
FEW_EPOCHS = 2  # are enough to see that two worlds do the same


@dataclasses.dataclass
class Outcome:
    accuracy: float
    in_step: list[bool]  # after each epoch
    weights: list[float]  # a few sums over the parameters, and over BatchNorm's statistics


def digits() -> tuple[TensorDataset, TensorDataset]:
    from sklearn.datasets import load_digits

    found = load_digits()
    images, labels = torch.tensor(found.data) / 16, torch.tensor(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:HELD_OUT], order[HELD_OUT:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def network() -> nn.Module:
    model = nn.Sequential(
        nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 10)
    ).double()
    generator = torch.Generator().manual_seed(1)  # torch's own is shared by the ranks of a world
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
            else:
                parameter.fill_(0.5)
    return model


def train(run: Run, sync: Strategy | None, epochs: int = 12, accumulate: int = 1) -> Outcome:
    data, test = digits()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.5)
    wrapped, optimizer = run.distribute(model, optimizer, sync=sync)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [epochs * 2 // 3], 0.1)
    in_step = []
    for _ in run.epochs(epochs):
        loader = run.loader(data, global_batch_size=128 // accumulate)
        for index, (x, y) in enumerate(loader):
            last = (index + 1) % accumulate == 0 or index + 1 == len(loader)
            with nullcontext() if last else run.no_sync(wrapped):
                loss = F.cross_entropy(wrapped(x), y) / accumulate
                loss.backward()
            run.observe_loss(loss * accumulate)
            if last:
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
        in_step.append(_same_parameters(run, wrapped))
    model.eval()
    with torch.no_grad():
        right = model(test.tensors[0]).argmax(dim=1) == test.tensors[1]
    return Outcome(float(right.double().mean()), in_step, _sums(model))


def _same_parameters(run: Run, model: nn.Module) -> bool:
    """All-reduce keeps statistics on each rank, so only parameters must be the same."""
    parameters = {name for name, _ in run.unwrap(model).named_parameters()}
    return not any(name in parameters for name, _ in run.check_in_step(model).differing)


def _sums(model: nn.Module) -> list[float]:
    return [float((tensor.double() ** 2).sum()) for tensor in model.state_dict().values()]


def main() -> None:
    folder = Path(sys.argv[1])
    world = fd.init(timeout=150)
    found: dict[str, Any] = {"transport": world.group.transport.name}
    for text in (*REPEATABLE, *SERVED):
        if text in SERVED:
            world.group.transport.topology = Topology.single(world.size)  # two were only declared
        settings = Settings(name="conform", folder=folder / "runs", script="conform")
        run = Run(world.group, world.topology, world.device, settings=settings)
        found[text] = dataclasses.asdict(train(run, parse(text), FEW_EPOCHS))
    (folder / f"{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

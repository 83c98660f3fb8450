"""share_facts.py FOLDER: models whose layers mix samples, on tiles and without, on real processes.

Writes FOLDER/<rank>.json: how far the weights are from those of the plain model after two steps,
or why a model was refused.
"""

from __future__ import annotations

import copy
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import farandole as fd
from farandole.layout import parse_layout
from farandole.layout.partition.stage_module import PassId
from farandole.layout.recording.state.random_states import set_seed
from farandole.train.settings import Settings

Inside = Callable[["Net", Tensor], Tensor]
SIZE = 8
SEED = 3


class Net(nn.Module):
    def __init__(self, inside: Inside) -> None:
        super().__init__()
        self.inside = inside
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.0)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x).tanh()
        if float(x.detach().mean()) > 1:  # so that it cannot be traced
            raise AssertionError
        x = self.second(self.inside(self, x)).flatten(1)
        scores: Tensor = self.head(self.drop(x.view(x.shape[0], 4, -1).mean(2)))
        return scores, scores.square().mean()  # an auxiliary number beside the output


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return -gradients[0]


def nothing(net: Net, x: Tensor) -> Tensor:
    return x


def custom_function(net: Net, x: Tensor) -> Tensor:
    result: Tensor = Reversed.apply(x)
    return result


def reentrant(net: Net, x: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return net.second(x).tanh()
    result: Tensor = checkpoint(lambda x: net.second(x).tanh(), x, use_reentrant=True)
    return result


def token_norm(net: Net, x: Tensor) -> Tensor:
    tokens = x.flatten(1).view(x.shape[0], 4, -1).transpose(1, 2)
    flat = net.norm(tokens.reshape(-1, 4))
    return flat.view(tokens.shape).transpose(1, 2).reshape(x.shape)


def standardised(net: Net, x: Tensor) -> Tensor:
    flat = F.batch_norm(net.second.weight.reshape(1, 4, -1), None, None, training=True)
    return F.conv2d(x, flat.view_as(net.second.weight), padding=1)


def weight_view(net: Net, x: Tensor) -> Tensor:
    return x * net.second.weight.view(4, -1).std(1).mean()


def hook(net: Net, x: Tensor) -> Tensor:
    x = x * 1.0
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 2)
    return x


def mixed(net: Net, x: Tensor) -> Tensor:
    x = x / (x.var((0, 2, 3))[:, None, None] + 1) / (x.std() + 1) / x.norm()
    return x / x.abs().max() * x[x > 0].mean()


def joined_branch(net: Net, x: Tensor) -> Tensor:
    branch = F.relu(x.flatten(1) * 2).view(x.shape)
    return torch.cat([x, branch], 1)[:, 2:6]


def drawing(net: Net, x: Tensor) -> Tensor:
    """From all three generators; the ranks' are not alike."""
    at = random.randrange(3)
    x = x.roll(at, 2) * float(np.random.rand()) + torch.rand(x.shape)
    return x * torch.rand_like(x) + F.gumbel_softmax(x, dim=1)


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].clamp(-1e-3, 1e-3)


def clipped_weight(net: Net, x: Tensor) -> Tensor:
    return F.conv2d(x, Clipped.apply(net.second.weight), padding=1)


CASES: tuple[Inside, ...] = (
    nothing,
    custom_function,
    reentrant,
    token_norm,
    standardised,
    weight_view,
    hook,
    mixed,
    joined_branch,
    drawing,
    clipped_weight,
)


CHECKED = (reentrant, token_norm, hook, mixed)


def loss(found: tuple[Tensor, Tensor], wanted: Tensor) -> Tensor:
    return F.cross_entropy(found[0], wanted) + 0.1 * found[1]


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 3, SIZE, SIZE, generator=generator), torch.arange(4)


def off_from_plain(run: fd.Run, inside: Inside, *, check: bool) -> Any:
    """The largest difference of any weight, buffer or prediction."""
    torch.manual_seed(0)
    model = Net(inside)
    plain = copy.deepcopy(model)
    settings = Settings(name="other", folder=run.folder, script="facts")
    one = fd.Run(run.group, run.topology, run.device, settings=settings, seed=SEED)
    trainer = one.trainer(
        model,
        loss,
        lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9),
        layout=parse_layout("tiles=2x1"),
        check=check,
    )
    x, y = batch()
    optimizer = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    try:
        for step in range(2):
            trainer.step(x, y)
            optimizer.zero_grad()
            set_seed(PassId(SEED, step, 0).seed_of(0))
            loss(plain(x), y).backward()
            optimizer.step()
        predicted = trainer.predict(x)
    except fd.FarandoleError as error:
        return str(error)
    set_seed(PassId(0, -1, 0).seed_of(0))
    with torch.no_grad():
        expected = plain.eval()(x)
    pairs = [*zip(predicted, expected, strict=True)]
    pairs += [(value, plain.state_dict()[name]) for name, value in model.state_dict().items()]
    return max(float((found - true).abs().max()) for found, true in pairs)


def main() -> None:
    torch.set_default_dtype(torch.float64)
    run = fd.init(timeout=150)
    set_seed(run.rank)
    found = {
        f"{inside.__name__} {'checked' if check else 'unchecked'}": off_from_plain(
            run, inside, check=check
        )
        for inside in CASES
        for check in (True, False)
        if inside in CHECKED or not check
    }
    (Path(sys.argv[1]) / f"{run.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

"""What benchmarks of tiles share: models by a text, images of any size, and trainers in one world.

A model is written as its name and its builder's options, such as `amoebanet_d:layers=3,filters=32`.
The ResNet-110 has an option more: `resnet110_v2:units=2` keeps two of the 18 units of each stage,
for what would take minutes a step on CPU cores.
"""

from __future__ import annotations

import itertools
import os
from collections import OrderedDict
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from common import restart_on_workers
from pipelines import new_run
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import farandole as fd
from farandole.layout import parse_layout
from farandole.models import build
from farandole.train.trainer import Trainer

CLASSES = 10
CHANNELS = 3
CONVOLUTIONS = "convolutions"
_SMALLEST_SAMPLE = 128


def on_cores(workers: int) -> None:
    """As `restart_on_workers`; the workers compute on cores alone, as GPUs are hidden."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    restart_on_workers(workers)


def network(text: str, size: int) -> nn.Module:
    """The same weights whenever it is asked for. `size`: of the images, in pixels a side."""
    name, options = _read(text)
    torch.manual_seed(0)
    if name == CONVOLUTIONS:
        return convolutions(**options)
    units = options.pop("units", None)
    model = build(name, classes=CLASSES, channels=CHANNELS, image_size=size, **options)
    if units is None:
        return model
    kept = [(part, block) for part, block in model.named_children() if _unit(part) <= units]
    return nn.Sequential(OrderedDict(kept))


def convolutions(layers: int = 12, width: int = 16) -> nn.Sequential:
    """Until its end nothing but halos travels here: there is no BatchNorm."""
    widths = [CHANNELS, *(width for _ in range(layers))]
    blocks = [
        nn.Sequential(nn.Conv2d(one, other, 3, padding=1), nn.ReLU(inplace=True))
        for one, other in itertools.pairwise(widths)
    ]
    return nn.Sequential(*blocks, nn.Conv2d(width, CLASSES, 1), nn.AdaptiveAvgPool2d(1), Flat())


class Flat(nn.Module):
    """One score for each class."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)


def batch(
    text: str, size: int, samples: int, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Images of noise, made where they are wanted, and classes: of images, or of their pixels."""
    generator = torch.Generator(device or "cpu").manual_seed(1)
    shape = (samples, CHANNELS, size, size)
    x = torch.randn(shape, generator=generator, device=device)
    pixels = (samples, size, size) if _read(text)[0] == "unet" else (samples,)
    return x, torch.randint(CLASSES, pixels, generator=generator, device=device)


class Side:
    """A model under one layout, in a run of its own, so that several can take turns in one world.

    `balance`: a cut that another side has found.
    """

    def __init__(
        self,
        world: fd.Run,
        text: str,
        layout: str | None,
        size: int,
        samples: int,
        *,
        balance: tuple[int, ...] = (),
        precision: torch.dtype | None = None,
    ) -> None:
        self.run = new_run(world)
        self.x, self.y = batch(text, size, samples, self.run.device)
        chosen = None if layout is None else parse_layout(layout)
        sample = None
        if chosen is not None and chosen.stages != 1:
            if balance:
                chosen = parse_layout(f"{layout},balance={'+'.join(map(str, balance))}")
            else:  # smaller: what blocks take grows with the pixels, for all of them alike
                side = max(min(_SMALLEST_SAMPLE, size), size // 4)
                sample = self.x[:, :, :side, :side].contiguous()
        self.trainer: Trainer = self.run.trainer(
            network(text, size),
            F.cross_entropy,
            sgd,
            layout=chosen,
            sample=sample,
            precision=precision,
            check=False,  # what is measured is training
        )

    def step(self) -> float:
        """Its loss."""
        return float(self.trainer.step(self.x, self.y))

    def work(self) -> None:
        """A step for a clock, which wants no loss."""
        self.step()

    @property
    def balance(self) -> tuple[int, ...]:
        layout = self.trainer.layout
        return () if layout is None else layout.balance

    def close(self) -> None:
        self.run.close()


def sgd(parameters: Iterator[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.01)


def _read(text: str) -> tuple[str, dict[str, int]]:
    name, _, options = text.partition(":")
    pairs = (option.split("=") for option in options.split(",") if option)
    return name, {key: int(value) for key, value in pairs}


def _unit(name: str) -> int:
    """The number of a ResNet's unit within its stage; 0 for what is no unit."""
    _, found, number = name.partition("_unit")
    return int(number) if found else 0

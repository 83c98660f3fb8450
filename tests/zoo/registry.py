"""The zoo: architectures as small modules of ours, each with a batch and a loss.

Every file beside this one adds a family. The facts of an architecture are those of its publication
(what is connected with what); widths, depths and images are as small as they can be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Draw = Callable[[int, torch.Generator], Any]
Loss = Callable[[Any, Any], Tensor]

CLASSES = 4


class Case(NamedTuple):
    """A model and what it is trained with."""

    name: str
    family: str
    build: Callable[[], nn.Module]
    inputs: Draw  # of so many samples
    targets: Draw
    loss: Loss
    axes: int  # of the image; 0: the inputs are not images, and tiles have nothing to cut
    draws: bool  # random numbers, which are replaced by their expected values
    changes: bool  # its forward changes buffers or attributes: the first step may refuse that


ZOO: dict[str, Case] = {}


def numbers(*shape: int) -> Draw:
    def draw(rows: int, generator: torch.Generator) -> Tensor:
        return torch.randn(rows, *shape, generator=generator, dtype=torch.float64)

    return draw


def whole_numbers(limit: int, *shape: int) -> Draw:
    def draw(rows: int, generator: torch.Generator) -> Tensor:
        return torch.randint(limit, (rows, *shape), generator=generator)

    return draw


def several(*draws: Draw) -> Draw:
    """Some arguments, or targets, at once."""
    return lambda rows, generator: tuple([draw(rows, generator) for draw in draws])


IMAGES = numbers(3, 16, 16)
LABELS = whole_numbers(CLASSES)
PIXELS = whole_numbers(CLASSES, 16, 16)


def case(
    name: str,
    family: str,
    inputs: Draw = IMAGES,
    targets: Draw = LABELS,
    loss: Loss = F.cross_entropy,
    axes: int = 2,
    draws: bool = False,
    changes: bool = False,
) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Registers what builds a model."""

    def register(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        assert name not in ZOO, name
        ZOO[name] = Case(name, family, build, inputs, targets, loss, axes, draws, changes)
        return build

    return register


def conv(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, **options: Any) -> nn.Conv2d:
    """A convolution that keeps the size of an image, up to its stride."""
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, **options)


def conv_norm_relu(
    inputs: int, outputs: int, kernel: int = 3, stride: int = 1, **options: Any
) -> nn.Sequential:
    return nn.Sequential(
        conv(inputs, outputs, kernel, stride, bias=False, **options),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )

"""Every model by name, for command lines and configuration files.

The table is read off the builders themselves: a builder's keyword defaults are its native image
size, channels and classes, and whatever else it takes is an option. So nothing is said twice.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import nn

from farandole.errors import UserError, nearest
from farandole.models.alexnet import alexnet, alexnet_towers
from farandole.models.amoebanet import amoebanet_d
from farandole.models.googlenet import googlenet
from farandole.models.inception import inception_v3
from farandole.models.resnet import resnet18, resnet50, resnet110_v2
from farandole.models.small import mlp, small_cnn
from farandole.models.unet import unet
from farandole.models.vgg import vgg16

Builder = Callable[..., nn.Sequential]


@dataclass(frozen=True)
class ModelSpec:
    """A model by name: its builder, and what the builder assumes unless told otherwise."""

    name: str
    builder: Builder
    classes: int
    image_size: int
    channels: int
    pixels: bool  # whether it classifies every pixel, and not the image
    options: Mapping[str, Any]


def _spec(builder: Builder) -> ModelSpec:
    defaults = {
        name: parameter.default for name, parameter in inspect.signature(builder).parameters.items()
    }
    return ModelSpec(
        name=builder.__name__,
        builder=builder,
        classes=defaults.pop("classes"),
        image_size=defaults.pop("image_size"),
        channels=defaults.pop("channels"),
        pixels=builder is unet,
        options=MappingProxyType(defaults),
    )


SPECS: Mapping[str, ModelSpec] = MappingProxyType(
    {
        builder.__name__: _spec(builder)
        for builder in (
            alexnet,
            alexnet_towers,
            googlenet,
            inception_v3,
            resnet18,
            resnet50,
            resnet110_v2,
            vgg16,
            amoebanet_d,
            unet,
            small_cnn,
            mlp,
        )
    }
)
NAMES: tuple[str, ...] = tuple(SPECS)


def spec(name: str) -> ModelSpec:
    """The entry for `name`; `UserError` with the nearest name if there is none."""
    if name not in SPECS:
        raise UserError(f"There is no model {name!r}. {nearest(name, NAMES)}")
    return SPECS[name]


def build(
    name: str,
    *,
    classes: int | None = None,
    image_size: int | None = None,
    channels: int | None = None,
    **options: Any,
) -> nn.Sequential:
    """Builds a model by name; what is not given is the model's own default (see `spec`).

    `options` are the further keywords of its builder, such as `layers` of `amoebanet_d`. An
    unknown name or option, or an image too small for the model, is a `UserError`.
    """
    entry = spec(name)
    for option in options:
        if option not in entry.options:
            raise UserError(f"{name} has no option {option!r}. {nearest(option, entry.options)}")
    return entry.builder(
        classes=entry.classes if classes is None else classes,
        image_size=entry.image_size if image_size is None else image_size,
        channels=entry.channels if channels is None else channels,
        **options,
    )

"""The `codec` option that strategies have in common."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from farandole.comm.codecs import Codec
from farandole.comm.codecs import parse as parse_codec
from farandole.errors import UserError

CODEC: Mapping[str, Any] = MappingProxyType({"parse": parse_codec})
"""What a field that takes a codec, its text or None says of itself."""


def read_codec(strategy: str, codec: Codec | str | None) -> Codec | None:
    """The codec that was meant."""
    if isinstance(codec, str):
        return parse_codec(codec)
    if codec is not None and not isinstance(codec, Codec):
        raise UserError(
            f"{strategy}: codec={codec!r} is no codec. Give one, such as Int8(), or its "
            "text, such as 'int8'."
        )
    return codec


def check_compressible(model: nn.Module, codec: Codec) -> None:
    """Before the training, not in its first backward pass."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not parameter.is_floating_point():
            raise UserError(
                f"the codec {codec} compresses real numbers; {name!r} is {parameter.dtype}. "
                "Leave the codec out."
            )

"""Codecs: gradients made smaller before they travel."""

from __future__ import annotations

from types import MappingProxyType

from farandole.comm.codecs.codec import Codec
from farandole.comm.codecs.compressor import Compressor
from farandole.comm.codecs.halves import Bf16, Fp16
from farandole.comm.codecs.int8 import Int8
from farandole.comm.codecs.powersgd import PowerSgd
from farandole.comm.codecs.randk import RandK
from farandole.comm.codecs.sign import Sign
from farandole.comm.codecs.topk import TopK
from farandole.options import parse_named

CODECS: MappingProxyType[str, type[Codec]] = MappingProxyType(
    {kind.name: kind for kind in (Fp16, Bf16, Int8, TopK, RandK, Sign, PowerSgd)}
)

__all__ = [
    "CODECS",
    "Bf16",
    "Codec",
    "Compressor",
    "Fp16",
    "Int8",
    "PowerSgd",
    "RandK",
    "Sign",
    "TopK",
    "parse",
]


def parse(text: str) -> Codec:
    """The codec that `name` or `name:key=value/…` describes.

    Raises `UserError` with the nearest name for an unknown codec or key.
    """
    return parse_named(CODECS, text, what="codec")

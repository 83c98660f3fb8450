"""What a client sends of a push, and as what: filters, codecs, and lists of rows by digest."""

from __future__ import annotations

from types import MappingProxyType

from farandole.comm.codecs import CODECS
from farandole.errors import UserError
from farandole.options import parse_named
from farandole.server.filters.coding import Coding, coded_bytes, decode, encode, parse_codec
from farandole.server.filters.filter import Filter, Sieve
from farandole.server.filters.key_cache import KeyReceiver, KeySender
from farandole.server.filters.kkt import Kkt
from farandole.server.filters.savings import Savings
from farandole.server.filters.significant import Significant
from farandole.server.filters.skip import Skip

FILTERS: MappingProxyType[str, type[Filter]] = MappingProxyType(
    {kind.name: kind for kind in (Significant, Skip, Kkt)}
)

__all__ = [
    "FILTERS",
    "Coding",
    "Filter",
    "KeyReceiver",
    "KeySender",
    "Kkt",
    "Savings",
    "Sieve",
    "Significant",
    "Skip",
    "coded_bytes",
    "decode",
    "encode",
    "parse_codec",
    "parse_filter",
]


def parse_filter(text: str) -> Filter:
    """The filter that `name` or `name:key=value/…` describes. (Commas do as well.)

    Raises `UserError` with the nearest name for an unknown filter or key.
    """
    name = text.strip().partition(":")[0]
    if name in CODECS:
        raise UserError(f"{name!r} is a codec, not a filter. Write codec={text.strip()}.")
    return parse_named(FILTERS, text, what="filter")

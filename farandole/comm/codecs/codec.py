"""What a codec is on paper: its options, its text form, and how many bytes it sends.

A codec is a frozen dataclass. It can be written, read, compared and planned with before anything is
sent; `build` puts it to work.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from farandole.comm.meter import ring_bytes
from farandole.errors import UserError
from farandole.options import format_options

if TYPE_CHECKING:
    from farandole.comm.codecs.compressor import Compressor

SMALL_ELEMENTS = 1024
"""Tensors with fewer elements travel raw: what they would save is lost in latency."""


@dataclass(frozen=True)
class Codec(ABC):
    """How tensors are made smaller before they travel. Subclasses have a `name`."""

    name: ClassVar[str]

    @abstractmethod
    def build(self, algorithm: str = "auto") -> Compressor:
        """Puts the codec to work, with nothing remembered yet.

        `algorithm` is the all-reduce for what travels raw; `auto` adds in rank order.
        """

    @abstractmethod
    def encoded_bytes(self, shape: Sequence[int], itemsize: int, ranks: int) -> int:
        """Bytes that each rank sends to average a tensor that is compressed."""

    def compresses(self, shape: Sequence[int], itemsize: int, ranks: int) -> bool:
        """Whether a tensor is compressed: it must be worth it, and get smaller."""
        count = math.prod(shape)
        return count >= SMALL_ELEMENTS and self.encoded_bytes(shape, itemsize, ranks) < ring_bytes(
            count * itemsize, ranks
        )

    def wire_bytes(self, shape: Sequence[int], itemsize: int, ranks: int) -> int:
        """Bytes that each rank sends to average a tensor, compressed or not."""
        if self.compresses(shape, itemsize, ranks):
            return self.encoded_bytes(shape, itemsize, ranks)
        return ring_bytes(math.prod(shape) * itemsize, ranks)

    def times_smaller(self, shape: Sequence[int], itemsize: int, ranks: int) -> float:
        """How many times fewer bytes travel than by a raw all-reduce."""
        wire = self.wire_bytes(shape, itemsize, ranks)
        return ring_bytes(math.prod(shape) * itemsize, ranks) / wire if wire else 1.0

    def __str__(self) -> str:
        """The text form: `powersgd:rank=4/warm_steps=10`.

        Options are parted by `/`, because a strategy's own, around them, are parted by `,`.
        """
        options = format_options(self).replace(",", "/")
        return f"{self.name}:{options}" if options else self.name


def check_ratio(name: str, ratio: float) -> None:
    if not 0 < ratio <= 1:  # nor NaN
        raise UserError(
            f"{name}: ratio={ratio:g} must be above 0 and at most 1: the share of the elements "
            f"that travel, such as {name}:ratio=0.01."
        )


def check_at_least(name: str, option: str, value: int, least: int) -> None:
    if value < least:
        raise UserError(f"{name}: {option}={value} must be at least {least}.")

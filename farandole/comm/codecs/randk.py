"""A few numbers, at random places that all ranks draw alike, so that no places need travel."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from farandole.comm.codecs.codec import Codec, check_ratio
from farandole.comm.codecs.compressor import LEFT, Compressor, Contribution, Outcome
from farandole.comm.codecs.shared_random import shared_random
from farandole.comm.group import Group
from farandole.comm.meter import ring_bytes

_STEP = "step"


@dataclass(frozen=True)
class RandK(Codec):
    """The `ratio` of each tensor's elements, others in every step."""

    name: ClassVar[str] = "randk"

    ratio: float = 0.1  # the share of the elements that travel
    feedback: bool = True  # add what did not travel to the next gradient
    seed: int = 0

    def __post_init__(self) -> None:
        check_ratio(self.name, self.ratio)

    def build(self, algorithm: str = "auto") -> Compressor:
        return _RandKAtWork(self, algorithm)

    def kept(self, count: int) -> int:
        """How many of `count` elements travel."""
        return max(1, round(self.ratio * count))

    def encoded_bytes(self, shape: Sequence[int], itemsize: int, ranks: int) -> int:
        return ring_bytes(self.kept(math.prod(shape)) * max(itemsize, 4), ranks)


class _RandKAtWork(Compressor):
    codec: RandK

    def _sum(
        self, parts: Mapping[str, Contribution], raw: Sequence[torch.Tensor], group: Group
    ) -> tuple[dict[str, Outcome], list[torch.Tensor]]:
        drawn = {name: self._draw(name, part) for name, part in parts.items()}
        mine = []
        for name, part in parts.items():
            places, _ = drawn[name]
            # What is not finite must be known to all, also where it does not travel.
            mine.append(part.values[places] if part.is_finite else _nothing(part, places))
        sums = self._sum_raw([*mine, *raw], group)
        outcomes = {}
        for (name, part), values in zip(parts.items(), sums, strict=False):
            places, stands_for = drawn[name]
            memory = {_STEP: part.memory.get(_STEP, 0) + 1}
            if self.codec.feedback:
                memory[LEFT] = part.values.index_fill_(0, places, 0)
            else:
                values = values * stands_for  # so that the mean over all draws is the tensor
            outcomes[name] = Outcome(
                torch.zeros_like(part.values).index_copy_(0, places, values), memory
            )
        return outcomes, sums[len(parts) :]

    def _draw(self, name: str, part: Contribution) -> tuple[torch.Tensor, torch.Tensor]:
        """Places, and how many elements each stands for: one out of each of `kept` equal stretches.

        Every element is as likely as any other, and drawing costs as much as what is drawn.
        """
        count = part.values.numel()
        kept = self.codec.kept(count)
        bounds = np.arange(kept + 1) * count // kept
        lengths = np.diff(bounds)
        random = shared_random(self.codec.seed, name, part.memory.get(_STEP, 0))
        places = bounds[:-1] + (random.random(kept) * lengths).astype(np.int64)
        device, dtype = part.values.device, part.values.dtype
        return (
            torch.from_numpy(places).to(device),
            torch.from_numpy(lengths).to(device=device, dtype=dtype),
        )


def _nothing(part: Contribution, places: torch.Tensor) -> torch.Tensor:
    return torch.full_like(part.values[places], math.nan)

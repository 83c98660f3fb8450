"""The few largest numbers travel, with their places; the rest waits until it has grown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from farandole.comm.codecs.codec import Codec, check_ratio
from farandole.comm.codecs.compressor import LEFT, Compressor, Contribution, Outcome
from farandole.comm.codecs.wire import Column, pack, packed_bytes, unpack
from farandole.comm.group import Group

_SAMPLE = 2**15


@dataclass(frozen=True)
class TopK(Codec):
    """The `ratio` of each tensor's elements that are largest in size."""

    name: ClassVar[str] = "topk"

    ratio: float = 0.01  # the share of the elements that travel
    feedback: bool = True  # add what did not travel to the next gradient

    def __post_init__(self) -> None:
        check_ratio(self.name, self.ratio)

    def build(self, algorithm: str = "auto") -> Compressor:
        return _TopKAtWork(self, algorithm)

    def kept(self, count: int) -> int:
        """How many of `count` elements travel."""
        return max(1, round(self.ratio * count))

    def encoded_bytes(self, shape: Sequence[int], itemsize: int, ranks: int) -> int:
        precise = torch.float64 if itemsize == 8 else torch.float32
        return (ranks - 1) * packed_bytes(self.columns(math.prod(shape), precise))

    def columns(self, count: int, precise: torch.dtype) -> Sequence[Column]:
        """Places and values, as they travel."""
        place = torch.int32 if count < 2**31 else torch.int64
        return [(place, self.kept(count)), (precise, self.kept(count))]


class _TopKAtWork(Compressor):
    codec: TopK

    def _sum(
        self, parts: Mapping[str, Contribution], raw: Sequence[torch.Tensor], group: Group
    ) -> tuple[dict[str, Outcome], list[torch.Tensor]]:
        return self._exchange(parts, group) if parts else {}, self._sum_raw(raw, group)

    def _exchange(self, parts: Mapping[str, Contribution], group: Group) -> dict[str, Outcome]:
        chosen = {
            name: largest_places(part.values.abs(), self.codec.kept(part.values.numel()))
            for name, part in parts.items()
        }
        columns = {
            name: self.codec.columns(part.values.numel(), part.values.dtype)
            for name, part in parts.items()
        }
        mine = []
        for name, part in parts.items():
            (place_dtype, _), _ = columns[name]
            places = chosen[name]
            mine.append(pack(places.to(place_dtype)[None], part.values[places][None]))
        gathered = group.all_gather(torch.cat(mine, dim=1)[0].cpu())
        everyone = torch.stack(gathered).to(mine[0].device)
        outcomes = {}
        widths = [encoded.shape[1] for encoded in mine]
        for (name, part), encoded in zip(parts.items(), everyone.split(widths, dim=1), strict=True):
            places, values = unpack(encoded, columns[name])
            total = torch.zeros_like(part.values)
            # Rank by rank: within one no place comes twice, so the order of additions is fixed.
            for theirs, what in zip(places.long(), values, strict=True):
                total[theirs] += what
            memory = {}
            if self.codec.feedback:
                memory[LEFT] = part.values.index_fill_(0, chosen[name], 0)
            outcomes[name] = Outcome(total, memory)
        return outcomes


def largest_places(sizes: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the `count` largest, in any order. NaN counts as larger than any number."""
    if sizes.device.type != "cpu" or sizes.numel() < 2 * _SAMPLE:
        return sizes.topk(count, sorted=False).indices
    # Most numbers are far too small. A sample tells about where the line is; a low guess, and only
    # what is not below it is looked at. That takes a tenth of the time.
    # The guess may be wrong. If fewer than `count` are above it, the search is done in full, so a
    # guess costs time and never changes which elements are found.
    sample = sizes[:: sizes.numel() // _SAMPLE | 1]  # an odd step, not to follow rows
    guess = min(len(sample), math.ceil(1.2 * count * len(sample) / sizes.numel()) + 20)
    line = float(sample.topk(guess, sorted=False).values.amin())
    candidates = torch.from_numpy(np.flatnonzero(~(sizes.numpy() < line)))
    if len(candidates) < count:
        return sizes.topk(count, sorted=False).indices
    return candidates[sizes[candidates].topk(count, sorted=False).indices]

"""Whether all ranks see the same stream, and a resumed epoch the one that it began with.

An iterable dataset is read by every rank, which keeps its share of each global batch. A dataset
that splits itself by rank, or shuffles differently on each, would lose samples and repeat others,
and nobody would see it. So the ranks compare the first samples of each pass. They are part of the
position too: an epoch that goes on reads past what was used, which must be the same samples.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from farandole.comm import Group
from farandole.data.position import Position
from farandole.errors import UserError

COMPARED_SAMPLES: Final = 8
"""A split or a shuffle shows in the first ones."""

Digests = dict[str, str]
"""Of the values of several samples at each place of them, such as `1` or `image`."""


def digests(samples: Sequence[Any]) -> Digests:
    """Values of unknown kinds are left out: they cannot be compared."""
    found: dict[str, Any] = {}
    for sample in samples:
        for place, value in _values(sample, ""):
            found.setdefault(place, hashlib.sha256()).update(value)
    return {place: digest.hexdigest() for place, digest in found.items()}


def check_stream(group: Group, position: Position, own: Digests) -> None:
    """*Together.* Before the first batch of a pass is used, or of what is left of one. `own` are
    the digests of the stream's first samples on this rank. Raises `UserError` on all ranks if the
    streams differ; warns if a resumed epoch goes on in another order than it began with."""
    if group.size > 1:
        require_same_stream(group, own)
    before = position.first_samples
    is_other = before and not any(own.get(place) == before[place] for place in before)
    if position.done_samples and is_other and group.rank == 0:
        warnings.warn(
            f"{position.done_samples} samples of this epoch were used before, and the iterable "
            "dataset now begins with others than it did then. If its order has changed, samples "
            "are lost and others repeated in this epoch: let the order depend on nothing but the "
            "epoch, which a method set_epoch(epoch) is told. If samples are only changed at random "
            "(augmentation), nothing is wrong.",
            stacklevel=2,
        )
    position.first_samples = own


def require_same_stream(group: Group, own: Digests) -> None:
    """*Together.* Raises `UserError` on all ranks if no value of the first samples is the same on
    all of them. Warns if some are: then samples are the same, and are changed at random."""
    told: list[Digests] = group.gather_json(own)
    places = sorted(set().union(*told))
    other = {place: _differing([each.get(place) for each in told]) for place in places}
    differing = {place: rank for place, rank in other.items() if rank}
    if not differing:
        return
    rank = min(differing.values())
    if len(differing) == len(places):
        raise UserError(
            "every rank reads the whole of an iterable dataset, and keeps its share of each "
            f"batch. Here the first samples of ranks 0 and {rank} differ, so samples would be "
            "lost and others repeated. If the dataset splits itself by rank or reads "
            "torch.distributed, let it give all samples. If it shuffles, seed that with the epoch, "
            "which a method set_epoch(epoch) is told, and not with the rank. Files are split by "
            "fd.data.shards, of which each rank opens only its own."
        )
    if group.rank == 0:
        named = ", ".join(repr(place) for place in differing)
        warnings.warn(
            f"the first samples of the iterable dataset differ between ranks 0 and {rank} in "
            f"{named}, and are the same in the rest. That is right if {named} is changed at random "
            "(augmentation). If the samples are others, some are lost and some repeated: every "
            "rank must see the same stream.",
            stacklevel=2,
        )


def _differing(digests: Sequence[str | None]) -> int:
    """The first rank that has another one than rank 0; 0 if there is none."""
    return next((rank for rank, each in enumerate(digests) if each != digests[0]), 0)


def _values(sample: Any, place: str) -> Iterator[tuple[str, bytes]]:
    """All values of a sample, by their places in it."""
    parts: Iterator[tuple[Any, Any]] | None = None
    if isinstance(sample, Mapping):
        parts = iter(sample.items())
    elif isinstance(sample, (list, tuple)):
        parts = enumerate(sample)
    if parts is not None:
        for name, part in parts:
            yield from _values(part, f"{place}.{name}" if place else str(name))
        return
    value = _bytes(sample)
    if value is not None:
        yield place, value


def _bytes(value: Any) -> bytes | None:
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_quantized:
            return None
        flat = value.detach().cpu().contiguous().flatten()
        value = flat.view(torch.uint8).numpy()
    if isinstance(value, (np.ndarray, np.generic)):
        return None if value.dtype.hasobject else value.tobytes()
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return repr(value).encode()
    return None

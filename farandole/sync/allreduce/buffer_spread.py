"""Rank 0's buffers on all ranks, after every backward pass: a BatchNorm's running statistics.

    buffers     mean₁   var₁   count₁   mean₂ …         wherever the model has them
    on rank 0    │ copied side by side
    packed      │ mean₁ │ var₁ │ count₁ │ mean₂ │ …      one broadcast for each device
    elsewhere    │ copied back

Where they lie in the packed bytes is worked out once, and again when the model's buffers are other
ones. This runs in every step: a ResNet-50 has 159 buffers, and a walk over its modules that finds
them takes as long as all the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import nn

from farandole.comm import Group
from farandole.sync.common.alignment import check_same_model

_ALIGNED_BYTES = 16


class BufferSpread:
    """Keeps the buffers of one model as they are on rank 0. All ranks are known to hold the same
    model when this is made (`check_same_model`)."""

    def __init__(self, model: nn.Module, group: Group) -> None:
        self._model = model
        self._group = group
        self._generation = group.generation
        self.look_for_modules()
        self._packs: list[_Pack] = []  # of the buffers of the last pass
        self._identities: list[int] = []
        self._kinds = _kinds_of(self._found().values())

    def look_for_modules(self) -> None:
        """Buffers that a module gains or replaces are noticed at once; other modules only here."""
        self._holders = [module._buffers for module in self._model.modules()]

    def spread(self) -> None:
        """*Together.*"""
        found = self._found()
        kinds = _kinds_of(found.values())
        is_known = kinds == self._kinds and self._generation == self._group.generation
        if not is_known:
            # Packed bytes do not tell what they are: the same number of them would pass.
            check_same_model(self._model, self._group)
            self._kinds, self._generation = kinds, self._group.generation
        if not is_known or list(found) != self._identities:
            self._packs = _pack(list(found.values()))
            self._identities = list(found)
        with torch.no_grad():
            for pack in self._packs:
                if self._group.rank == 0:
                    pack.fill()
                # To compare what the ranks are about to do costs more than all the rest between
                # GPUs, and next to nothing between CPUs.
                self._group.broadcast(pack.flat, agreed=pack.flat.is_cuda)
                if self._group.rank != 0:
                    pack.hand_back()

    def _found(self) -> dict[int, torch.Tensor]:
        """By their identities, so that one which two modules share is there once."""
        return {
            id(buffer): buffer
            for holder in self._holders
            for buffer in holder.values()
            if buffer is not None
        }


def _kinds_of(buffers: Collection[torch.Tensor]) -> list[list[object]]:
    """Not their strides: those may differ between ranks, and packed bytes do not."""
    return [list(map(attrgetter(name), buffers)) for name in ("shape", "dtype", "device")]


@dataclass(frozen=True)
class _Pack:
    """The buffers of one device, side by side.

    It holds the model's own tensors, so their identities stay theirs as long as they are compared,
    and one whose memory is replaced (`buffer.data = …`) is still found."""

    flat: torch.Tensor  # bytes
    pairs: list[tuple[list[torch.Tensor], list[torch.Tensor]]]
    """For each dtype: buffers, and their places in `flat`."""

    def fill(self) -> None:
        for buffers, places in self.pairs:
            torch._foreach_copy_(places, buffers)

    def hand_back(self) -> None:
        for buffers, places in self.pairs:
            torch._foreach_copy_(buffers, places)


def _pack(buffers: Sequence[torch.Tensor]) -> list[_Pack]:
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for buffer in buffers:
        if buffer.numel():
            by_device.setdefault(buffer.device, []).append(buffer)
    return [_pack_one(device, here) for device, here in by_device.items()]


def _pack_one(device: torch.device, buffers: Sequence[torch.Tensor]) -> _Pack:
    rounded = [-(-buffer.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES for buffer in buffers]
    begins = [0, *itertools.accumulate(rounded)]
    flat = torch.zeros(begins[-1], dtype=torch.uint8, device=device)
    by_dtype: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for buffer, begin in zip(buffers, begins, strict=False):
        place = flat[begin : begin + buffer.nbytes].view(buffer.dtype).view(buffer.shape)
        ours, places = by_dtype.setdefault(buffer.dtype, ([], []))
        ours.append(buffer)
        places.append(place)
    return _Pack(flat, list(by_dtype.values()))

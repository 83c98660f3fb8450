"""What a pipeline's activations take, measured while it runs, beside what its schedule predicts.

No allocator on a CPU reports the memory of activations alone. So for a few steps, autograd's own
hooks count what is kept for the backward of each micro-batch, and the peak is reported. On a GPU
the allocator's peak is reported too.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch

from farandole.layout.recording.saved_tensors import noted, saved_tensors_noted

_MIB = 2**20


class ActivationMeter:
    """Of one rank: how many bytes of activations its stages hold, and held at the peak."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._kept: dict[Hashable, dict[int, int]] = {}  # by micro-batch: storages, and their bytes

    @contextmanager
    def forward(
        self, key: Hashable, inputs: Sequence[torch.Tensor], weights: set[int]
    ) -> Iterator[None]:
        """Around a forward pass; `weights` are storages that do not count."""
        kept = self._kept.setdefault(key, {})

        def note(place: int, size: int) -> None:
            if place not in weights:
                kept[place] = size

        for tensor in inputs:  # kept in any case: their gradients are asked for
            noted(tensor, note)
        with saved_tensors_noted(note):
            yield
        self.peak_bytes = max(self.peak_bytes, self._held_bytes())

    def backward(self, key: Hashable) -> None:
        """The backward of it has ended."""
        self._kept.pop(key, None)

    def _held_bytes(self) -> int:
        # By storage, since two micro-batches may keep the same tensor, such as a mask. It takes
        # memory once.
        storages = {place: size for kept in self._kept.values() for place, size in kept.items()}
        return sum(storages.values())


def storages_of(tensors: Sequence[torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def describe_memory(
    measured: Sequence[float],
    predicted: Sequence[float] | None,
    stages: Sequence[Sequence[int]],
    device_peaks: Sequence[float | None],
) -> str:
    """A line for each rank of a pipeline."""
    lines = []
    for rank, activations in enumerate(measured):
        named = "+".join(map(str, stages[rank]))
        line = f"rank {rank}, stage {named}: activations at the peak {activations / _MIB:.3g} MiB"
        if predicted is not None:
            line += f", predicted {predicted[rank] / _MIB:.3g} MiB"
        peak = device_peaks[rank]
        if peak is not None:
            line += f"; {peak / _MIB:.0f} MiB on the GPU in all"
        lines.append(line)
    return "\n".join(lines)

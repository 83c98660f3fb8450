"""Batches on their way to the device that trains.

A copy to a GPU from pinned memory runs beside what the GPU computes, if it is on a stream of its
own. So the next batch is copied while the model works on this one:

    side stream      copy 0 │ copy 1 │        copy 2 │
    current stream          │ step 0           │ step 1           │
                            └ waits for copy 0 └ waits for copy 1, which is there

Two things make that right. The current stream waits for the event behind the copy before it uses a
batch. And each tensor is recorded on the current stream: its memory belongs to the side stream, and
must not be given to a later copy before the step that reads it is over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


class DeviceCopies:
    """Takes batches to `device`, one ahead of the script if it is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: torch.cuda.Stream | None = None  # made by whoever reads first

    def moved(self, batches: Iterator[Any]) -> Iterator[Any]:
        if self._device.type == "cuda":
            return self._ahead(batches)
        if self._device.type == "cpu":
            return batches
        return (to_device(batch, self._device) for batch in batches)

    def _ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        if self._side is None:
            self._side = torch.cuda.Stream(self._device)
        held: list[tuple[Any, torch.cuda.Event | None]] = []
        for batch in batches:
            held.append(self._started(batch, self._side))
            if len(held) > 1:
                yield self._ready(*held.pop(0))
        for last in held:
            yield self._ready(*last)

    def _started(self, batch: Any, side: torch.cuda.Stream) -> tuple[Any, torch.cuda.Event | None]:
        if not _is_known(batch):
            return batch, None
        # New memory of the side stream has been in use on it only: `record_stream` sees to the
        # current one's. So the copy need not wait for the step under way.
        with torch.cuda.stream(side):
            return to_device(batch, self._device), side.record_event()

    def _ready(self, batch: Any, copied: torch.cuda.Event | None) -> Any:
        if copied is None:
            return to_device(batch, self._device)
        current = torch.cuda.current_stream(self._device)
        current.wait_event(copied)
        _record(batch, current)
        return batch


def _is_known(batch: Any) -> bool:
    """Whether all tensors in it can be found: else they cannot be recorded, and the batch is copied
    on the current stream when it is needed."""
    if isinstance(batch, torch.Tensor) or callable(getattr(batch, "record_stream", None)):
        return True
    if isinstance(batch, Mapping):
        return all(map(_is_known, batch.values()))
    if isinstance(batch, (list, tuple)):  # packed sequences too
        return all(map(_is_known, batch))
    return not callable(getattr(batch, "to", None))


def _record(batch: Any, stream: torch.cuda.Stream) -> None:
    """Every tensor of it is in use on `stream` from now on."""
    if isinstance(batch, torch.Tensor):
        if batch.is_cuda:
            batch.record_stream(stream)
    elif callable(getattr(batch, "record_stream", None)):
        batch.record_stream(stream)
    elif isinstance(batch, Mapping):
        for value in batch.values():
            _record(value, stream)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            _record(value, stream)


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor in it on `device`; other values as they are."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if callable(getattr(batch, "to", None)):  # packed sequences, graphs, tokenizers' batches
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch

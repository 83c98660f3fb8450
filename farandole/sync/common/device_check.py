"""Checks gradients on a device without waiting for the device.

    device    … backward ─ look ─ answer ─ zeros? ─ step ─ forward ─ backward ─ …
    host      … launches all that, and goes on ………………………… reads the answer, before the next step

Where one gradient is not finite, the device itself replaces all of them by zeros. So no NaN gets
into the parameters, although the host does not know of it yet. The host reads the answer before the
next step. By then the device has usually computed it.

On a GPU a kernel of our own does it (`finite_kernels`); where it does not serve, PyTorch's
operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from farandole.sync.allreduce.buckets import Bucket
from farandole.sync.common.kinds import Kinds

_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}  # integers of the same size


class Kernels(Protocol):
    def find_and_clear(
        self, gradients: Sequence[torch.Tensor], kinds: Kinds | None = None
    ) -> np.ndarray | None:
        """For each 0 or, if it is not finite, 1; then all of them are zeros, and behind the last is
        a 1. It stands there when the device has come so far, and until the next call. None, and
        nothing done: not for these. `kinds` as in `DeviceChecks.start`."""


class DeviceChecks:
    """Starts the check of each step, and remembers the kernels of each device."""

    def __init__(self) -> None:
        self._kernels: dict[torch.device, Kernels | None] = {}
        self._events: dict[torch.device, torch.cuda.Event] = {}
        self._kinds: Kinds | None = None  # of the gradients of the last check
        self._places: dict[torch.device, list[int]] = {}

    def start(
        self,
        gradients: Sequence[torch.Tensor],
        flats: Callable[[], Sequence[torch.Tensor]],
        buckets: Sequence[Bucket],
        kinds: Kinds | None = None,
    ) -> DeviceCheck:
        """Checks `gradients`, which lie in `flats`, and copies the buckets' notes to the host.

        `kinds` are the gradients', where they are known. Where they are the same object as in the
        last check, what follows from kinds is not worked out again.
        """
        # Queued in the order of the stream: notes and answers are on the host before anything
        # replaces what they are about, and the step, queued later, sees zeros.
        notes = _notes(buckets)
        order: list[int] = []
        answers: list[np.ndarray] = []
        events: list[torch.cuda.Event] = []
        if kinds is None or kinds is not self._kinds:
            self._places = _by_device(gradients)
            self._kinds = kinds
        for device, places in self._places.items():
            here = gradients if len(places) == len(gradients) else [gradients[at] for at in places]
            order += places
            kernels = self._kernels_of(device)
            found = None if kernels is None else kernels.find_and_clear(here, kinds)
            if found is None:
                bad = _are_bad(here)
                _clear_if(bad[-1], [flat for flat in flats() if flat.device == device])
                found = _to_host(bad).numpy()
            answers.append(found)
            if device.type == "cuda":
                events.append(self._record(device))
        return DeviceCheck(order, answers, events, buckets, notes)

    def _kernels_of(self, device: torch.device) -> Kernels | None:
        if device not in self._kernels:
            self._kernels[device] = _build_kernels(device)
        return self._kernels[device]

    def _record(self, device: torch.device) -> torch.cuda.Event:
        """Marks the point in the device's queue after which the answers are on the host."""
        # One for all steps: that of the step before has been waited for.
        event = self._events.get(device)
        if event is None:
            event = self._events[device] = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device.index))
        return event


class DeviceCheck:
    """A check that was started. It is read when its answers are needed, before the next one."""

    def __init__(
        self,
        order: Sequence[int],
        answers: Sequence[np.ndarray],
        events: Sequence[torch.cuda.Event],
        buckets: Sequence[Bucket],
        notes: Sequence[torch.Tensor],
    ) -> None:
        self._order = order
        self._answers = answers
        self._events = events
        self._buckets = buckets
        self._notes = notes

    def first_bad(self) -> int | None:
        """The place of the first gradient that was not finite. Waits for its own work only."""
        for event in self._events:
            event.synchronize()
        if not any(answer[-1] for answer in self._answers):
            return None
        answers = [is_bad for answer in self._answers for is_bad in answer[:-1].tolist()]
        return min(at for at, is_bad in zip(self._order, answers, strict=True) if is_bad)

    def noted(self) -> list[tuple[Bucket, list[int]]]:
        """The ranks that have left a note in each bucket. Comes after `first_bad`."""
        return [
            (bucket, [rank for rank, note in enumerate(notes.tolist()) if note != 0])
            for bucket, notes in zip(self._buckets, self._notes, strict=True)
        ]


def _notes(buckets: Sequence[Bucket]) -> list[torch.Tensor]:
    """A copy of each bucket's, on the host when the device has got so far."""
    if len({(bucket.notes.dtype, bucket.notes.device) for bucket in buckets}) != 1:
        return [_to_host(bucket.notes.clone()) for bucket in buckets]
    together = _to_host(torch.cat([bucket.notes for bucket in buckets]))
    return list(together.split([len(bucket.notes) for bucket in buckets]))


def _by_device(gradients: Sequence[torch.Tensor]) -> dict[torch.device, list[int]]:
    """The places of the gradients on each device."""
    devices = [gradient.device for gradient in gradients]
    if devices.count(devices[0]) == len(devices):
        return {devices[0]: list(range(len(devices)))}
    found: dict[torch.device, list[int]] = {}
    for place, device in enumerate(devices):
        found.setdefault(device, []).append(place)
    return found


def _build_kernels(device: torch.device) -> Kernels | None:
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    try:
        from farandole.sync.common import finite_kernels
    except ImportError:  # a PyTorch without Triton
        return None
    return finite_kernels.serving(device)


def _are_bad(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """An answer for each of them, which are all on one device, and one for all behind those."""
    norms = list(torch._foreach_norm(list(gradients), math.inf))
    if len({norm.dtype for norm in norms}) > 1:
        norms = [norm.double() for norm in norms]
    bad = ~(torch.stack(norms) < math.inf)  # a NaN is not, either
    return torch.cat([bad, bad.any().unsqueeze(0)])


def _clear_if(one_is_bad: torch.Tensor, flats: Sequence[torch.Tensor]) -> None:
    """Zeros instead of all of them, if `one_is_bad`: few launches for many tensors.

    The bits are multiplied as integers, by 1 or 0. As numbers a NaN times 0 would stay a NaN.
    """
    kinds: dict[torch.dtype, list[torch.Tensor]] = {}
    for flat in flats:
        bits = _BITS.get(flat.dtype)
        if bits is None:
            flat.masked_fill_(one_is_bad, 0)
        else:
            kinds.setdefault(bits, []).append(flat.view(bits))
    for bits, views in kinds.items():
        torch._foreach_mul_(views, (~one_is_bad).to(bits))


def _to_host(answers: torch.Tensor) -> torch.Tensor:
    return answers.to("cpu", non_blocking=answers.is_cuda)  # into pinned memory

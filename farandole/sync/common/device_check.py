"""Checks gradients on a device without waiting for the device.

    device    … backward ─ norms ─ copy ─ zeros? ─ step ─ forward ─ backward ─ …
    host      … launches all that, and goes on ………………………… reads the copy, before the next step

Where one gradient is not finite, the device itself replaces all of them by zeros. So no NaN gets
into the parameters, although the host does not know of it yet. The host reads the answer before the
next step. By then the device has usually computed it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from farandole.sync.allreduce.buckets import Bucket

_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}  # integers of the same size


class DeviceCheck:
    """Checks `gradients`, which lie in `flats`, and copies the buckets' notes to the host."""

    def __init__(
        self,
        gradients: Sequence[torch.Tensor],
        flats: Sequence[torch.Tensor],
        buckets: Sequence[Bucket],
    ) -> None:
        self._buckets = buckets
        # Queued in the order of the stream: notes and answers are copied before `_keep_if`
        # replaces what they are about, and the step, queued later, sees zeros.
        self._order: list[int] = []
        self._copies: list[torch.Tensor] = []
        self._events: list[torch.cuda.Event | None] = []
        self._notes = [_to_host(bucket.notes != 0) for bucket in buckets]
        for device, places in _by_device(gradients).items():
            self._order += places
            sound = _are_finite([gradients[place] for place in places])
            self._copies.append(_to_host(sound))
            _keep_if(sound.all(), [flat for flat in flats if flat.device == device])
            self._events.append(_record(device))

    def first_bad(self) -> int | None:
        """The place of the first gradient that was not finite. Waits for its own work only."""
        for event in self._events:
            if event is not None:
                event.synchronize()
        sound = [is_sound for copy in self._copies for is_sound in copy.tolist()]
        bad = [place for place, is_sound in zip(self._order, sound, strict=True) if not is_sound]
        return min(bad, default=None)

    def noted(self) -> list[tuple[Bucket, list[int]]]:
        """The ranks that have left a note in each bucket. Comes after `first_bad`."""
        return [
            (bucket, [rank for rank, is_bad in enumerate(notes.tolist()) if is_bad])
            for bucket, notes in zip(self._buckets, self._notes, strict=True)
        ]


def _by_device(gradients: Sequence[torch.Tensor]) -> dict[torch.device, list[int]]:
    """The places of the gradients on each device."""
    found: dict[torch.device, list[int]] = {}
    for place, gradient in enumerate(gradients):
        found.setdefault(gradient.device, []).append(place)
    return found


def _are_finite(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """One answer for each of them, which are all on one device."""
    norms = list(torch._foreach_norm(list(gradients), math.inf))
    if len({norm.dtype for norm in norms}) > 1:
        norms = [norm.double() for norm in norms]
    return torch.stack(norms) < math.inf  # a NaN is not, either


def _keep_if(all_sound: torch.Tensor, flats: Sequence[torch.Tensor]) -> None:
    """Zeros instead of all of them, unless `all_sound`: few launches for many tensors.

    The bits are multiplied as integers, by 1 or 0. As numbers a NaN times 0 would stay a NaN.
    """
    kinds: dict[torch.dtype, list[torch.Tensor]] = {}
    for flat in flats:
        bits = _BITS.get(flat.dtype)
        if bits is None:
            flat.masked_fill_(~all_sound, 0)
        else:
            kinds.setdefault(bits, []).append(flat.view(bits))
    for bits, views in kinds.items():
        torch._foreach_mul_(views, all_sound.to(bits))


def _to_host(answers: torch.Tensor) -> torch.Tensor:
    return answers.to("cpu", non_blocking=answers.is_cuda)  # into pinned memory


def _record(device: torch.device) -> torch.cuda.Event | None:
    """Marks the point in the device's queue after which the answers are on the host."""
    if device.type != "cuda":
        return None  # its copies are waited for
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event

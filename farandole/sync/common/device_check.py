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


class DeviceCheck:
    """Checks `gradients`, which lie in `flats`, and copies the buckets' notes to the host."""

    def __init__(
        self,
        gradients: Sequence[torch.Tensor],
        flats: Sequence[torch.Tensor],
        buckets: Sequence[Bucket],
    ) -> None:
        self._buckets = buckets
        self._order = [
            place
            for device in dict.fromkeys(gradient.device for gradient in gradients)
            for place, gradient in enumerate(gradients)
            if gradient.device == device
        ]
        # Queued in the order of the stream: notes and answers are copied before `masked_fill_`
        # replaces what they are about, and the step, queued later, sees zeros.
        self._copies = []
        self._notes = [_to_host(bucket.notes != 0) for bucket in buckets]
        for device in dict.fromkeys(gradient.device for gradient in gradients):
            sound = _are_finite([g for g in gradients if g.device == device])
            self._copies.append(_to_host(sound))
            is_bad = ~sound.all()
            for flat in flats:
                if flat.device == device:
                    flat.masked_fill_(is_bad, 0)
        self._events = [_record(device) for device in {gradient.device for gradient in gradients}]

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


def _are_finite(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """One answer for each of them, which are all on one device."""
    norms = torch._foreach_norm(list(gradients), math.inf)
    return (
        torch.stack([torch.isfinite(norm) for norm in norms])
        if _differ(norms)
        else (torch.isfinite(torch.stack(list(norms))))
    )


def _differ(norms: Sequence[torch.Tensor]) -> bool:
    return len({norm.dtype for norm in norms}) > 1


def _to_host(answers: torch.Tensor) -> torch.Tensor:
    return answers.to("cpu", non_blocking=answers.is_cuda)  # into pinned memory


def _record(device: torch.device) -> torch.cuda.Event | None:
    """Marks the point in the device's queue after which the answers are on the host."""
    if device.type != "cuda":
        return None  # its copies are waited for
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event

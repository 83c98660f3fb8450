"""Between a GPU and the memory that servers see: one copy at full speed instead of one a tensor.

    GPU     g₀ g₁ g₂ … ──▶ │ g₀ │ g₁ │ g₂ │ … │
    host                    ╰─ one transfer ─▶ │ pinned │ ─▶ │ the table's buffer │

The table's buffer lies in memory shared with other processes, which a GPU reaches slowly, in small
pieces, and with a wait for each. Pinned memory it reads and writes by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Staging:
    """For tensors of these kinds, in this order, all on one device."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        device, dtype = tensors[0].device, tensors[0].dtype
        counts = [tensor.numel() for tensor in tensors]
        pinned = device.type == "cuda"
        self._flat = torch.empty(sum(counts), dtype=dtype, device=device)
        self._leaving = torch.empty(sum(counts), dtype=dtype, pin_memory=pinned)
        self._arriving = torch.empty(sum(counts), dtype=dtype, pin_memory=pinned)
        pairs = zip(self._flat.split(counts), tensors, strict=True)
        self._views = [piece.view(tensor.shape) for piece, tensor in pairs]
        self._sent: torch.cuda.Event | None = None  # the last transfer to the device

    def take(self, tensors: Sequence[torch.Tensor | None], into: torch.Tensor) -> None:
        """Copies tensors of the device into a buffer of the host; a missing one counts as zeros.
        Waits for the device."""
        there = [
            (view, tensor)
            for view, tensor in zip(self._views, tensors, strict=True)
            if tensor is not None
        ]
        if len(there) < len(self._views):
            self._flat.zero_()
        if there:
            torch._foreach_copy_([view for view, _ in there], [tensor for _, tensor in there])
        self._leaving.copy_(self._flat, non_blocking=True)
        sent = self._mark()
        if sent is not None:
            sent.synchronize()
        into.copy_(self._leaving)

    def give(self, values: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Copies a buffer of the host into tensors of the device. Does not wait for the device."""
        if self._sent is not None:
            self._sent.synchronize()  # it may not have read the values before these
        self._arriving.copy_(values)
        self._flat.copy_(self._arriving, non_blocking=True)
        self._sent = self._mark()
        torch._foreach_copy_(list(tensors), self._views)

    def _mark(self) -> torch.cuda.Event | None:
        """What has been queued so far."""
        if self._flat.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._flat.device))
        return event


def staging_of(tensors: Sequence[torch.Tensor]) -> Staging | None:
    """None where copies need none: on the CPU, or where tensors are on several devices."""
    devices = {tensor.device for tensor in tensors}
    on_gpu = len(devices) == 1 and devices.pop().type == "cuda"
    return Staging(tensors) if on_gpu else None

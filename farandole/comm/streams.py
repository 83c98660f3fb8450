"""Work of a background thread on a GPU: a stream of its own, and who waits for whom.

    caller's stream   ── compute ──●───── compute goes on ─────────●── uses the result
                                   │ begins after what was queued   ▲ waits for the end
    side stream                    ╰──── exchange ─────────────────●╯

Without a stream of its own, an exchange in the background would stand in line with the caller's
computation, and the computation with the exchange: nothing would overlap, and two ranks whose sends
stand before their receives would wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class SideStreams:
    """The stream on which one background thread works: one for each GPU that it is used from."""

    def __init__(self) -> None:
        self._streams: dict[int, torch.cuda.Stream] = {}

    def apart(self, work: Callable[[], T]) -> Callable[[], T]:
        """`work` on the side stream, after what is queued on the current stream now."""
        if not torch.cuda.is_initialized():
            return work
        side = self._side()
        began = torch.cuda.current_stream().record_event()

        def on_side() -> T:
            with torch.cuda.stream(side):
                side.wait_event(began)
                return work()

        return on_side

    def _side(self) -> torch.cuda.Stream:
        device = torch.cuda.current_device()
        if device not in self._streams:
            # With priority: what others wait for should not stand behind computation.
            self._streams[device] = torch.cuda.Stream(device, priority=-1)
        return self._streams[device]


def as_here(work: Callable[[], T]) -> Callable[[], T]:
    """`work` as it would run in this thread: on the GPU stream that is current here."""
    if not torch.cuda.is_initialized():
        return work
    stream = torch.cuda.current_stream()

    def on_stream() -> T:
        with torch.cuda.stream(stream):
            return work()

    return on_stream


class Ready:
    """The point of a stream at which something is there. Made in the thread that has put it there,
    on the stream that did."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [tensor for tensor in tensors if tensor.is_cuda]
        self._event = torch.cuda.current_stream().record_event() if self._tensors else None

    def wait(self) -> None:
        """What is queued here from now on comes after it. The host does not wait."""
        if self._event is None:
            return
        current = torch.cuda.current_stream()
        current.wait_event(self._event)
        for tensor in self._tensors:
            tensor.record_stream(current)  # its memory is used here, too
        self._tensors = []


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Those of a result of a collective: a tensor, or a list of them; anything else has none."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [item for item in value if isinstance(item, torch.Tensor)]
    return []

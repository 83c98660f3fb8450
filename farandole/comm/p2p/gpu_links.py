"""Links between two GPUs: what describes a message goes through shared memory, its tensors by NCCL.

    host     ── header ─▶ slot ─▶ header                       both hosts go on at once
    GPU      compute ──●                          ●── compute
    streams            ╰── send ═══ NCCL ═══ receive ──╯       beside what both compute

Nothing waits for a GPU but a GPU. A thread would only be in the way: whoever launches kernels holds
the interpreter, and a thread that wants to launch one more waits for milliseconds.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from farandole.comm.group import Group
from farandole.comm.p2p.links import HEADER, RECEIVER, SENDER, FrameReceiver, FrameSender, Label
from farandole.comm.transports.base import Transport
from farandole.comm.transports.shm.frames import Frames


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


class GpuSender(FrameSender):
    """`wire` takes tensors from GPU to GPU."""

    def __init__(
        self,
        transport: Transport,
        group: Group,
        frames: Frames,
        wire: Transport,
        device: torch.device,
    ) -> None:
        super().__init__(transport, group, frames)
        self._wire = wire
        self._device = device
        self._side = _stream(device)
        self._send([torch.zeros(1, device=device)])  # NCCL connects now, while both are here

    def goes_at_once(self, flats: list[torch.Tensor]) -> bool:
        return super().goes_at_once([])

    def _put(self, number: int, label: Label, text: bytes, flats: list[torch.Tensor]) -> None:
        super()._put(number, label, text, [])
        if flats:
            self._send(flats)

    def _send(self, flats: list[torch.Tensor]) -> None:
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            self._wire.exchange([(RECEIVER, flat) for flat in flats], [])


class GpuReceiver(FrameReceiver):
    """What it receives is there when its stream has got so far."""

    lies_ready = True

    def __init__(
        self,
        transport: Transport,
        group: Group,
        device: torch.device,
        frames: Frames,
        wire: Transport,
    ) -> None:
        super().__init__(transport, group, device, frames)
        self._wire = wire
        self._side = _stream(device)
        with self.stream():
            self._fetch([torch.zeros(1, device=device)])

    def stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._side)

    def receive(self) -> tuple[Label | None, Any]:
        frame = self._frames.get()
        number, text_bytes, whole, *rest = HEADER.unpack_from(frame.memory)
        text = bytes(frame.memory[HEADER.size : HEADER.size + text_bytes]) if whole else b""
        self._frames.done()
        if not whole:
            text = self._text(text_bytes)
        if self.is_failure(number):
            return None, text.decode(errors="replace")
        description = self._described(number, text)
        tensors = self._empty(description)
        self._fetch([tensor.view(-1) for tensor in tensors if tensor.numel()])
        return (rest[0], *rest[1:]), self._filled(description, tensors)

    def _fetch(self, flats: list[torch.Tensor]) -> None:
        if not flats:
            return
        nbytes = sum(flat.nbytes for flat in flats)
        with self._group.trace.span("receive", "comm", bytes=nbytes, by=self._wire.name):
            self._wire.exchange([], [(SENDER, flat) for flat in flats])

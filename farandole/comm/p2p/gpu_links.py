"""Links between two GPUs: what describes a message goes through shared memory, its tensors by NCCL.

    host     ── header ─▶ slot ─▶ header                       both hosts go on at once
    GPU      compute ──●                          ●── compute
    NCCL               ╰── send ════════ receive ──╯           beside what both compute

Nothing waits for a GPU but a GPU. A thread would only be in the way: whoever launches kernels holds
the interpreter, and a thread that wants to launch one more waits for milliseconds.
"""

from __future__ import annotations

from collections import deque
from functools import partial

import torch
import torch.distributed as dist

from farandole.comm.group import Group
from farandole.comm.p2p.links import (
    HEADER,
    RECEIVER,
    SENDER,
    Arrival,
    FrameReceiver,
    FrameSender,
    Label,
)
from farandole.comm.transports.base import GpuWire, Transport
from farandole.comm.transports.shm.frames import Frames


class GpuSender(FrameSender):
    """`wire` takes tensors from GPU to GPU."""

    def __init__(
        self,
        transport: Transport,
        group: Group,
        frames: Frames,
        wire: GpuWire,
        device: torch.device,
    ) -> None:
        super().__init__(transport, group, frames)
        self._wire = wire
        self._leaving: deque[tuple[dist.Work, list[torch.Tensor]]] = deque()
        self._send([torch.zeros(1, device=device)])  # NCCL connects now, while both are here

    def goes_at_once(self, flats: list[torch.Tensor]) -> bool:
        return super().goes_at_once([])

    def _put(self, number: int, label: Label, text: bytes, flats: list[torch.Tensor]) -> None:
        super()._put(number, label, text, [])
        if flats:
            self._send(flats)

    def _send(self, flats: list[torch.Tensor]) -> None:
        """After what has been queued here. Nothing here waits for it, so the tensors are held until
        they have left."""
        while self._leaving and self._leaving[0][0].is_completed():
            self._leaving.popleft()
        work = self._wire.queue_on_gpu([(RECEIVER, flat) for flat in flats], [])
        self._leaving.append((work, flats))


class GpuReceiver(FrameReceiver):
    """What it receives comes on the GPU, when that has got so far."""

    lies_ready = True

    def __init__(
        self,
        transport: Transport,
        group: Group,
        device: torch.device,
        frames: Frames,
        wire: GpuWire,
    ) -> None:
        super().__init__(transport, group, device, frames)
        self._wire = wire
        # Memory of a stream that does nothing else is free at once. On the stream that computes, a
        # message could come only after all that is queued there.
        self._side = torch.cuda.Stream(device, priority=-1)
        with torch.cuda.stream(self._side):
            self._fetch([torch.zeros(1, device=device)]).wait()

    def receive(self) -> Arrival:
        frame = self._frames.get()
        number, text_bytes, whole, *rest = HEADER.unpack_from(frame.memory)
        text = bytes(frame.memory[HEADER.size : HEADER.size + text_bytes]) if whole else b""
        self._frames.done()
        if not whole:
            text = self._text(text_bytes)
        if self.is_failure(number):
            return Arrival.of_failure(text)
        description = self._described(number, text)
        work = None
        with torch.cuda.stream(self._side):
            tensors = self._empty(description)
            flats = [tensor.view(-1) for tensor in tensors if tensor.numel()]
            if flats:
                work = self._fetch(flats)
        value = self._filled(description, tensors)
        return Arrival((rest[0], *rest[1:]), value, partial(_use, work, tensors))

    def _fetch(self, flats: list[torch.Tensor]) -> dist.Work:
        nbytes = sum(flat.nbytes for flat in flats)
        with self._group.trace.span("receive", "comm", bytes=nbytes, by=self._wire.name):
            return self._wire.queue_on_gpu([], [(SENDER, flat) for flat in flats])


def _use(work: dist.Work | None, tensors: list[torch.Tensor]) -> None:
    """From now on, on the current stream."""
    if work is None:
        return
    work.wait()
    current = torch.cuda.current_stream(tensors[0].get_device())
    for tensor in tensors:
        tensor.record_stream(current)

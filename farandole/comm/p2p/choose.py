"""Which kind of link connects two ranks, by what carries their messages."""

from __future__ import annotations

import torch

from farandole.comm.group import Group
from farandole.comm.p2p.gpu_links import GpuReceiver, GpuSender
from farandole.comm.p2p.links import (
    RECEIVER,
    SENDER,
    FrameReceiver,
    FrameSender,
    Receiver,
    Sender,
    WireReceiver,
    WireSender,
)
from farandole.comm.transports.base import Transport


def sender_of(transport: Transport, group: Group, device: torch.device) -> Sender:
    """*Together* with `receiver_of` on the other end."""
    frames, wire = transport.frames(RECEIVER), transport.gpu_wire
    if frames is None:
        return WireSender(transport, group)
    if wire is not None and device.type == "cuda":
        return GpuSender(transport, group, frames, wire, device)
    return FrameSender(transport, group, frames)


def receiver_of(transport: Transport, group: Group, device: torch.device) -> Receiver:
    frames, wire = transport.frames(SENDER), transport.gpu_wire
    if frames is None:
        return WireReceiver(transport, group, device)
    if wire is not None and device.type == "cuda":
        return GpuReceiver(transport, group, device, frames, wire)
    return FrameReceiver(transport, group, device, frames)

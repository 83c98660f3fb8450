"""Memory of a GPU that all ranks on it can read, and events that tell when it may be read.

Each rank has two slots, used in turn, and for each three events:

    copied      what this rank contributes lies in its slot
    reduced     this rank's piece of the sum lies there
    collected   this rank has read what it needed of the others' slots

A process can wait for an event of another one on its own stream, without the host. What it waits
for is the last record of that event that was queued. So the hosts must see to it that the record is
queued before: they meet in between.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from farandole.comm.transports.base import Transport
from farandole.comm.transports.shared_gpu.memory import GpuMemory

SLOTS = 2
_KINDS = ("copied", "reduced", "collected")
_CARD_BYTES = 4096  # of the text by which a rank's memory and events are opened elsewhere


@dataclass(frozen=True)
class Slot:
    """One rank's memory of one turn, as seen from any rank of the GPU."""

    memory: torch.Tensor  # bytes
    copied: torch.cuda.Event
    reduced: torch.cuda.Event
    collected: torch.cuda.Event

    def part(self, begin: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """`count` elements from the `begin`th on."""
        size = dtype.itemsize
        return self.memory[begin * size : (begin + count) * size].view(dtype)


def share_slots(via: Transport, slot_bytes: int, device: torch.device) -> list[list[Slot]]:
    """*Together.* Every rank's slots, in rank order. Raises `RuntimeError` where the driver or the
    sandbox does not let processes open each other's memory."""
    own: list[Slot] = []
    problem, card = "", ""
    try:
        memories = [GpuMemory.make(slot_bytes, device) for _ in range(SLOTS)]
        own = [Slot(memory.tensor, **_make_events()) for memory in memories]
        card = json.dumps([_card(*pair) for pair in zip(memories, own, strict=True)])
        if len(card) > _CARD_BYTES:
            raise RuntimeError(f"{len(card)} bytes describe a slot, and {_CARD_BYTES} have room")
    except RuntimeError as error:
        problem = str(error).splitlines()[0]
    cards = _gather(via, card)
    found: list[list[Slot]] = []
    if not problem and all(cards):
        try:
            found = [
                own
                if rank == via.rank
                else [_open(one, slot_bytes, device) for one in json.loads(text)]
                for rank, text in enumerate(cards)
            ]
        except RuntimeError as error:
            problem = str(error).splitlines()[0]
    told = via.share(problem[:200] if problem else "" if found else "a rank cannot share its own")
    for rank, text in enumerate(told):
        if text:
            raise RuntimeError(f"rank {rank}: {text}")
    return found


def _make_events() -> dict[str, torch.cuda.Event]:
    events = {kind: torch.cuda.Event(interprocess=True) for kind in _KINDS}
    for event in events.values():
        event.record()  # it exists from its first record on
    return events


def _card(memory: GpuMemory, slot: Slot) -> dict[str, Any]:
    events = {kind: getattr(slot, kind).ipc_handle().hex() for kind in _KINDS}
    return {"memory": memory.handle().hex(), "events": events}


def _open(card: dict[str, Any], slot_bytes: int, device: torch.device) -> Slot:
    memory = GpuMemory.open(bytes.fromhex(card["memory"]), slot_bytes, device)
    events = {
        kind: torch.cuda.Event.from_ipc_handle(device, bytes.fromhex(handle))
        for kind, handle in card["events"].items()
    }
    return Slot(memory.tensor, **events)


def _gather(via: Transport, text: str) -> Sequence[str]:
    mine = torch.zeros(_CARD_BYTES, dtype=torch.uint8)
    encoded = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
    mine[: len(encoded)] = encoded
    everything = via.all_gather(mine, [_CARD_BYTES] * via.size)
    return [part.numpy().tobytes().rstrip(b"\0").decode() for part in everything.split(_CARD_BYTES)]

"""Two ways at once: CPU tensors take the fastest one between CPUs, tensors on GPUs NCCL.

Where NCCL cannot be used, because ranks share a GPU, tensors on GPUs travel as CPU tensors do: they
are copied into the memory of the host first. So every rank takes the same way, wherever it keeps
its tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from farandole.comm.arithmetic import Op
from farandole.comm.transports.base import Transport
from farandole.comm.transports.c10d import C10d
from farandole.comm.transports.messages import Message, PeerLost
from farandole.topology import Topology


class ByDevice(Transport):
    """`host` for CPU tensors; `world` for those on devices, if it has NCCL."""

    def __init__(self, host: Transport, world: C10d) -> None:
        self._host = host
        self._world = world
        super().__init__(host.rank, host.size, host.timeout, host.topology)
        self.name = host.name  # type: ignore[misc]
        self.native_is_fastest = host.native_is_fastest  # type: ignore[misc]
        self.never_waits = host.never_waits
        self.link, self.native_wins = host.link, host.native_wins
        self.link_age_seconds = host.link_age_seconds

    @property
    def topology(self) -> Topology:
        return self._host.topology

    @topology.setter
    def topology(self, topology: Topology) -> None:
        self._host.topology = self._world.topology = topology

    @property
    def process_group(self) -> dist.ProcessGroup:
        return self._world.process_group

    def carrier(self, tensor: torch.Tensor) -> Transport:
        return self._world if self._goes_direct(tensor) else self._host

    def _goes_direct(self, tensor: torch.Tensor) -> bool:
        return self._world.has_nccl and self.is_on_device(tensor)

    @staticmethod
    def is_on_device(tensor: torch.Tensor) -> bool:
        return tensor.device.type != "cpu"

    @staticmethod
    def to_host(tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself if it is there already."""
        return tensor.cpu()

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        # On all ranks first what goes through the host: no rank waits for two at once.
        near = [[m for m in part if not self._goes_direct(m[1])] for part in (sends, receives)]
        away = [[m for m in part if self._goes_direct(m[1])] for part in (sends, receives)]
        if any(near):
            landing = [(peer, self.to_host(into)) for peer, into in near[1]]
            self._host.exchange([(peer, self.to_host(data)) for peer, data in near[0]], landing)
            for (_, into), (_, arrived) in zip(near[1], landing, strict=True):
                _put(arrived, into)
        if any(away):
            self._world.exchange(*away)

    def share(self, claim: str) -> list[str]:
        return self._host.share(claim)

    def agree(self, claim: str) -> None:
        self._host.agree(claim)

    def all_reduce(self, flat: torch.Tensor, op: Op, algorithm: str, claim: str | None) -> None:
        if self._goes_direct(flat):
            if claim is not None:
                self._host.agree(claim)
            self._world.all_reduce(flat, op, algorithm, None)
            return
        here = self.to_host(flat)
        self._host.all_reduce(here, op, algorithm, claim)
        _put(here, flat)

    def reduce_if_agreed(
        self, claim: str, source: torch.Tensor, into: torch.Tensor, op: Op, algorithm: str
    ) -> list[str]:
        if self.is_on_device(source) or self.is_on_device(into):
            return super().reduce_if_agreed(claim, source, into, op, algorithm)
        return self._host.reduce_if_agreed(claim, source, into, op, algorithm)

    def reduce_scatter(self, flat: torch.Tensor, counts: Sequence[int], op: Op) -> torch.Tensor:
        if self._goes_direct(flat):
            return self._world.reduce_scatter(flat, counts, op)
        return self._host.reduce_scatter(self.to_host(flat), counts, op).to(flat.device)

    def all_gather(self, mine: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        if self._goes_direct(mine):
            return self._world.all_gather(mine, counts)
        return self._host.all_gather(self.to_host(mine), counts).to(mine.device)

    def broadcast(self, flat: torch.Tensor, source: int) -> None:
        if self._goes_direct(flat):
            self._world.broadcast(flat, source)
            return
        here = self.to_host(flat)
        self._host.broadcast(here, source)
        _put(here, flat)

    def all_to_all(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> None:
        if any(self._goes_direct(tensor) for tensor in (*sends, *receives)):
            self._world.all_to_all(sends, receives)
            return
        here = [self.to_host(into) for into in receives]
        self._host.all_to_all([self.to_host(data) for data in sends], here)
        for into, arrived in zip(receives, here, strict=True):
            _put(arrived, into)

    def register(self, tensor: torch.Tensor) -> AbstractContextManager[object]:
        here = not self.is_on_device(tensor)
        # All ranks must take the same way: a rank that registers waits for the registrations of the
        # others.
        if any(text != str(here) for text in self._host.share(str(here))):
            return nullcontext()  # on devices here, not there: the host's memory is no use
        return self._host.register(tensor) if here else nullcontext()

    def subgroup(self, ranks: Sequence[int]) -> Transport:
        return ByDevice(self._host.subgroup(ranks), self._world.subgroup(ranks))

    def channel(self, ranks: Sequence[int]) -> Transport:
        """Of the world's: what a model's stages send each other lies on devices."""
        return self._world.channel(ranks)

    def blame(self, lost: PeerLost) -> PeerLost:
        return self._host.blame(lost)

    def close(self) -> None:
        self._host.close()
        self._world.close()


def _put(arrived: torch.Tensor, into: torch.Tensor) -> None:
    if arrived is not into:
        into.copy_(arrived)

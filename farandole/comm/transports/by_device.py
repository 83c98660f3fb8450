"""Two ways at once: CPU tensors take the fastest one between CPUs, tensors on GPUs NCCL.

Where NCCL cannot be used, because ranks share a GPU, all-reduces take place in the GPU's own memory
(`shared_gpu`). Where not even that can be, tensors on GPUs travel as CPU tensors do: they are
copied into the memory of the host first. Every rank takes the same way, wherever it keeps its
tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from farandole.comm.arithmetic import Op
from farandole.comm.transports.agreement_beside import AgreementBeside
from farandole.comm.transports.base import ON_GPU, GpuWire, Transport
from farandole.comm.transports.c10d import C10d
from farandole.comm.transports.claims import DisagreementError
from farandole.comm.transports.messages import Message, PeerLost
from farandole.comm.transports.shared_gpu.transport import SharedGpu
from farandole.comm.transports.shm.frames import Frames
from farandole.comm.transports.shm.transport import SharedMemory
from farandole.topology import Topology


class ByDevice(Transport):
    """`host` for CPU tensors; for those on devices `direct`: `world` if it has NCCL. None: `host`
    for all."""

    def __init__(self, host: Transport, world: C10d, direct: Transport | None) -> None:
        self._host = host
        self._world = world
        self._direct = direct
        nccl = direct is world and world.has_nccl
        self._beside: AgreementBeside | None = None
        if nccl and isinstance(host, SharedMemory):  # between hosts a comparison comes first
            self._beside = AgreementBeside(host, world)
        super().__init__(host.rank, host.size, host.timeout, host.topology)
        self.name = host.name  # type: ignore[misc]
        self.native_is_fastest = host.native_is_fastest  # type: ignore[misc]
        # What is queued on a GPU does not lie ready for the other end: that has to receive it.
        self.never_waits = host.never_waits and direct is None
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

    @property
    def beside(self) -> AgreementBeside | None:
        """What reduces tensors on GPUs while the hosts compare, where that is possible."""
        return self._beside

    def carrier(self, tensor: torch.Tensor) -> Transport:
        return self._way_of(tensor) or self._host

    def place_of(self, tensor: torch.Tensor) -> tuple[str, ...]:
        return (ON_GPU,) if self._direct is not None and self.is_on_device(tensor) else ()

    def _way_of(self, tensor: torch.Tensor) -> Transport | None:
        """What carries it, if that is not the host's transport."""
        direct = self._direct
        if direct is None or not self.is_on_device(tensor):
            return None
        if self._beside is not None:
            self._beside.require_usable()
        return direct

    @staticmethod
    def is_on_device(tensor: torch.Tensor) -> bool:
        return not tensor.is_cpu

    @staticmethod
    def to_host(tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself if it is there already."""
        return tensor.cpu()

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        # On all ranks first what goes through the host: no rank waits for two at once.
        near = [[m for m in part if not self._way_of(m[1])] for part in (sends, receives)]
        away = [[m for m in part if self._way_of(m[1])] for part in (sends, receives)]
        if any(near):
            landing = [(peer, self.to_host(into)) for peer, into in near[1]]
            self._host.exchange([(peer, self.to_host(data)) for peer, data in near[0]], landing)
            for (_, into), (_, arrived) in zip(near[1], landing, strict=True):
                _put(arrived, into)
        if any(away) and self._direct is not None:
            self._direct.exchange(*away)

    def share(self, claim: str) -> list[str]:
        claims = self._host.share(claim)
        self._heard(claims)
        return claims

    def agree(self, claim: str) -> None:
        try:
            self._host.agree(claim)
        except DisagreementError as error:
            self._heard(error.claims)
            raise

    def _heard(self, claims: Sequence[str]) -> None:
        if self._beside is not None:
            self._beside.heard(claims)

    def all_reduce(self, flat: torch.Tensor, op: Op, algorithm: str, claim: str | None) -> None:
        direct = self._way_of(flat)
        try:
            if direct is None:
                here = self.to_host(flat)
                self._host.all_reduce(here, op, algorithm, claim)
                _put(here, flat)
            elif claim is not None and self._beside is not None:
                self._beside.all_reduce(flat, op, algorithm, claim)
            else:
                if claim is not None:
                    self._host.agree(claim)
                direct.all_reduce(flat, op, algorithm, None)
        except DisagreementError as error:
            self._heard(error.claims)
            raise

    def reduce_if_agreed(
        self, claim: str, source: torch.Tensor, into: torch.Tensor, op: Op, algorithm: str
    ) -> list[str]:
        if self.is_on_device(source) or self.is_on_device(into):
            return super().reduce_if_agreed(claim, source, into, op, algorithm)
        claims = self._host.reduce_if_agreed(claim, source, into, op, algorithm)
        self._heard(claims)
        return claims

    def reduce_scatter(self, flat: torch.Tensor, counts: Sequence[int], op: Op) -> torch.Tensor:
        if direct := self._way_of(flat):
            return direct.reduce_scatter(flat, counts, op)
        return self._host.reduce_scatter(self.to_host(flat), counts, op).to(flat.device)

    def all_gather(self, mine: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        if direct := self._way_of(mine):
            return direct.all_gather(mine, counts)
        return self._host.all_gather(self.to_host(mine), counts).to(mine.device)

    def broadcast(self, flat: torch.Tensor, source: int) -> None:
        if direct := self._way_of(flat):
            direct.broadcast(flat, source)
            return
        here = self.to_host(flat)
        self._host.broadcast(here, source)
        _put(here, flat)

    def all_to_all(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> None:
        ways = [self._way_of(tensor) for tensor in (*sends, *receives)]
        direct = next((way for way in ways if way is not None), None)
        if direct is not None:
            direct.all_to_all(sends, receives)
            return
        here = [self.to_host(into) for into in receives]
        self._host.all_to_all([self.to_host(data) for data in sends], here)
        for into, arrived in zip(receives, here, strict=True):
            _put(arrived, into)

    def register(self, tensor: torch.Tensor) -> AbstractContextManager[object]:
        here = not self.is_on_device(tensor)
        # All ranks must take the same way: a rank that registers waits for the registrations of the
        # others.
        if any(text != str(here) for text in self.share(str(here))):
            return nullcontext()  # on devices here, not there: the host's memory is no use
        return self._host.register(tensor) if here else nullcontext()

    def subgroup(self, ranks: Sequence[int]) -> Transport:
        return self._between(self._host.subgroup(ranks), self._world.subgroup(ranks))

    def channel(self, ranks: Sequence[int]) -> Transport:
        """What describes a message goes by the host, and its tensors from GPU to GPU."""
        return self._between(self._host.channel(ranks), self._world.channel(ranks))

    def frames(self, peer: int) -> Frames | None:
        # Without NCCL a tensor has to leave the GPU first: a thread waits for that, and no caller.
        return self._host.frames(peer) if self.gpu_wire is not None else None

    @property
    def gpu_wire(self) -> GpuWire | None:
        return self._world if self._direct is self._world and self._world.has_nccl else None

    def _between(self, host: Transport, world: Transport) -> ByDevice:
        assert isinstance(world, C10d)
        if self._direct is self._world:
            return ByDevice(host, world, world)
        direct = None
        if isinstance(self._direct, SharedGpu) and host.size > 1:
            direct = self._direct.between(host, world)
        return ByDevice(host, world, direct)

    def blame(self, lost: PeerLost) -> PeerLost:
        return self._host.blame(lost)

    def close(self) -> None:
        self._host.close()
        self._world.close()


def _put(arrived: torch.Tensor, into: torch.Tensor) -> None:
    if arrived is not into:
        into.copy_(arrived)

"""The seam between collectives and what carries the bytes.

A transport must be able to do one thing: `exchange` messages with other ranks, all at once. From
that this class makes every collective; a transport that knows a faster way overrides one.

Tensors that get here are flat and contiguous. All ranks make the same calls in the same order, one
at a time: a `Group` sees to that.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
import torch.distributed as dist

from farandole.comm.arithmetic import Op, combine_, divide_, reduce_into
from farandole.comm.transports.claims import (
    CLAIM_BYTES,
    decode_claim,
    encode_claim,
    require_agreement,
)
from farandole.comm.transports.messages import Message, PeerLost
from farandole.schedule import Link, RankRound, Schedule, build, piece_bounds
from farandole.topology import Topology

if TYPE_CHECKING:
    from farandole.comm.transports.shm.frames import Frames

NATIVE = "native"
"""The name of the all-reduce that a transport does by itself, without a schedule."""

ON_GPU = "on a GPU"

NEVER = 1 << 62
"""The epoch that does not come: for a rank that has nothing left to do."""

TYPICAL_LINK = Link(200e-6, 1e-9)  # gloo on a fast network

NativeWins = tuple[tuple[int, bool], ...]
"""For some numbers of bytes, from small to large: whether there the transport's own all-reduce beat
the schedule that should cost least. The same on all ranks. Measured by `calibration`."""


class GpuWire(Protocol):
    """What takes tensors from GPU to GPU while the hosts go on."""

    name: ClassVar[str]

    def queue_on_gpu(self, sends: Sequence[Message], receives: Sequence[Message]) -> dist.Work:
        """An exchange that comes after what the current stream was given before. What is given to
        a stream after `wait` on the result comes after it; until then somebody must hold the
        tensors."""


class Transport(ABC):
    """One rank's end of the connections between the ranks of a group."""

    name: ClassVar[str]
    native_is_fastest: ClassVar[bool] = False  # for CPU tensors of any size
    never_waits: bool = False  # to send: what was sent lies ready for the other end
    needs_the_host: ClassVar[bool] = False  # in mid-collective, also for tensors on GPUs
    averages_by_itself: bool = False  # `ReduceOp.AVG` of its process group, on tensors on GPUs
    may_join_late: ClassVar[bool] = False  # a rank that has died can be replaced in mid-run
    joined_late: bool = False  # the others had begun before

    def __init__(
        self, rank: int, size: int, timeout: timedelta, topology: Topology | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.topology = topology or Topology.single(size)
        self.link = TYPICAL_LINK
        """What a message costs; the same on all ranks. Measured by `calibration`."""
        self.link_age_seconds: float | None = None  # if an earlier job has measured it
        self.native_wins: NativeWins = ()

    @abstractmethod
    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Sends and receives everything at once; returns when all of it is done.

        Between two ranks messages arrive in the order they were sent. Both ends know every length,
        and nobody sends to itself. Raises `PeerLost` naming the peers that were waited for.
        """

    @abstractmethod
    def subgroup(self, ranks: Sequence[int]) -> Transport:
        """A transport between some of the ranks, this one among them; all of those must call it.

        There rank i is what here is `ranks[i]`.
        """

    def channel(self, ranks: Sequence[int]) -> Transport:
        """As `subgroup`, for messages rather than collectives: it may take less memory."""
        return self.subgroup(ranks)

    def carrier(self, tensor: torch.Tensor) -> Transport:
        """What really carries such a tensor: by which `auto` chooses, and the trace names it."""
        return self

    def place_of(self, tensor: torch.Tensor) -> tuple[str, ...]:
        """What ranks must agree on besides its kind, in words: where it lies, if that decides how
        it travels."""
        return ()

    def frames(self, peer: int) -> Frames | None:
        """Slots of shared memory between this rank and `peer`, where there are any."""
        return None

    @property
    def gpu_wire(self) -> GpuWire | None:
        """Between these ranks, where there is one."""
        return None

    def begin_epoch(self, epoch: int) -> int:
        """All ranks are about to begin `epoch`. Returns the one that is really next, which is
        another for a rank that has joined late."""
        return epoch

    def close(self) -> None:  # noqa: B027  (most hold nothing)
        """Gives back what the transport holds. Waits for nobody."""

    def interrupt(self) -> None:  # noqa: B027
        """From another thread: a peer is known to be lost. What waits for it fails soon, where that
        takes more than the end of the peer's process."""

    def abandon(self) -> None:
        """Leaves for good, in the middle of whatever it is: ranks that wait for this one notice."""
        self.close()

    def register(self, tensor: torch.Tensor) -> AbstractContextManager[object]:
        """Makes later all-reduces of `tensor` faster, until the context ends, if there is a way.

        All ranks call it together, with tensors of the same size.
        """
        return nullcontext()

    def blame(self, lost: PeerLost) -> PeerLost:
        """Who is really missing. `lost` names those that this rank itself has waited for.

        The group asks this once, when a collective has failed; it may take a second or two.
        """
        return lost

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The c10d group that carries this transport, if one does."""
        return None

    # Collectives. Each may be overridden by something faster.

    def share(self, claim: str) -> list[str]:
        """Every rank's `claim` (at most 256 bytes of text), in rank order: lg p rounds."""
        frame = torch.frombuffer(bytearray(encode_claim(claim)), dtype=torch.uint8)
        # Bruck's all-gather: row i holds the claim of rank + i; twice as many after each round.
        rows = frame.repeat(self.size, 1)
        known = 1
        while known < self.size:
            count = min(known, self.size - known)
            to, source = (self.rank - known) % self.size, (self.rank + known) % self.size
            incoming = torch.empty(count * CLAIM_BYTES, dtype=torch.uint8)
            self.exchange([(to, rows[:count].reshape(-1))], [(source, incoming)])
            rows[known : known + count] = incoming.view(count, CLAIM_BYTES)
            known += count
        # Row i is that of rank + i. Rolled, row r is that of rank r, on all ranks.
        rows = rows.roll(self.rank, 0)
        return [decode_claim(row.numpy().tobytes()) for row in rows]

    def agree(self, claim: str) -> None:
        """Raises `DisagreementError` on every rank, naming two that differ, unless all claim the
        same."""
        require_agreement(self.share(claim))

    def all_reduce(self, flat: torch.Tensor, op: Op, algorithm: str, claim: str | None) -> None:
        """Combines `flat` over all ranks in place; the same bits on all.

        `claim` says what this rank believes it is doing; None means that it is known to agree.
        """
        if algorithm == NATIVE:
            self.native_all_reduce(flat, op, claim)
            return
        if claim is not None:
            self.agree(claim)
        self.run_schedule(_cached_schedule(algorithm, self.size, self.topology), flat, op)
        divide_(flat, op, self.size)

    def reduce_if_agreed(
        self, claim: str, source: torch.Tensor, into: torch.Tensor, op: Op, algorithm: str
    ) -> list[str]:
        """Every rank's claim, as `share` has it, and of ranks that all claim the same also the
        combination of `source`, in `into`. Others may call `share` meanwhile."""
        claims = self.share(claim)
        if claims.count(claim) == self.size:
            if into is not source:
                into.copy_(source)
            self.all_reduce(into, op, algorithm, None)
        return claims

    def native_all_reduce(self, flat: torch.Tensor, op: Op, claim: str | None) -> None:
        """What the transport does by itself; one that knows nothing better runs a ring."""
        self.all_reduce(flat, op, "ring", claim)

    def run_schedule(self, schedule: Schedule, flat: torch.Tensor, op: Op) -> None:
        """Executes this rank's part of a schedule: one exchange a round. An average stays a sum."""
        bounds = piece_bounds(schedule.chunks, flat.numel()).tolist()
        for sends, receives in _cached_rounds(schedule, self.rank):
            outgoing = [
                (peer, flat[bounds[first] : bounds[stop]])
                for peer, first, stop, _ in sends
                if bounds[first] < bounds[stop]
            ]
            incoming: list[Message] = []
            additions = []
            for peer, first, stop, what in receives:
                target = flat[bounds[first] : bounds[stop]]
                if not target.numel():
                    continue
                if what == "add":
                    # What is added arrives beside its target: the same chunk may also be on its way
                    # out in this round, with the value that it had before.
                    addend = torch.empty_like(target)
                    additions.append((target, addend))
                    target = addend
                incoming.append((peer, target))
            if outgoing or incoming:
                self.exchange(outgoing, incoming)
            for target, addend in additions:
                combine_(target, addend, op)

    def reduce_scatter(self, flat: torch.Tensor, counts: Sequence[int], op: Op) -> torch.Tensor:
        """Rank r gets the r-th of the consecutive pieces, of `counts` elements, of the reduction.

        Contributions are combined in rank order.
        """
        pieces = flat.split(list(counts))
        mine = pieces[self.rank]
        parts = [mine if r == self.rank else torch.empty_like(mine) for r in range(self.size)]
        self.exchange(
            [(peer, pieces[peer]) for peer in self.others if counts[peer]],
            [(peer, parts[peer]) for peer in self.others if mine.numel()],
        )
        result = torch.empty_like(mine)
        reduce_into(result, parts, op)
        return result

    def all_gather(self, mine: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Every rank's elements, `counts` of them, one after the other in rank order."""
        everything = mine.new_empty(sum(counts))
        pieces = everything.split(list(counts))
        pieces[self.rank].copy_(mine)
        self.exchange(
            [(peer, mine) for peer in self.others if mine.numel()],
            [(peer, pieces[peer]) for peer in self.others if counts[peer]],
        )
        return everything

    def broadcast(self, flat: torch.Tensor, source: int) -> None:
        """Overwrites `flat` with that of rank `source`, down a binomial tree."""
        if not flat.numel():
            return
        # In round k, places below 2**k have the data, and each sends it 2**k places on.
        place = (self.rank - source) % self.size  # in the tree, whose root is place 0
        reach = 1
        while reach < self.size:
            if place < reach and place + reach < self.size:
                self.exchange([((self.rank + reach) % self.size, flat)], [])
            elif reach <= place < 2 * reach:
                self.exchange([], [((self.rank - reach) % self.size, flat)])
            reach *= 2

    def all_to_all(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> None:
        """Sends `sends[r]` to rank r and puts what comes from it into `receives[r]`."""
        receives[self.rank].copy_(sends[self.rank])
        self.exchange(
            [(peer, sends[peer]) for peer in self.others if sends[peer].numel()],
            [(peer, receives[peer]) for peer in self.others if receives[peer].numel()],
        )

    @property
    def others(self) -> list[int]:
        """The other ranks, nearest first, so that not all of them turn to rank 0 at once."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]


@functools.lru_cache(maxsize=64)
def _cached_schedule(name: str, size: int, topology: Topology) -> Schedule:
    return build(name, size, topology)


@functools.lru_cache(maxsize=64)
def _cached_rounds(schedule: Schedule, rank: int) -> list[RankRound]:
    return schedule.for_rank(rank)

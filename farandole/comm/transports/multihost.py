"""Several hosts: shared memory inside each, c10d between them.

The all-reduce has two levels, as `schedule.two_level` has it. For 2 hosts of 2 ranks:

    1. in the host       0 ⇄ 1    2 ⇄ 3       each rank gets the host's sum of half the vector
    2. across            0 ⇄ 2    1 ⇄ 3       halves are all-reduced, both at once
    3. in the host       0 ⇄ 1    2 ⇄ 3       the halves come together again

Only step 2 takes long. So the vector goes in blocks: two other threads take them across, while this
one does steps 1 and 3 for those behind and before. The network never waits for memory, nor, between
two messages of one block, for anything: there is always another block under way.

Whether all ranks are doing the same is asked first. The answer of the other hosts is on its way
while step 1, which changes nothing, takes place in this one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from farandole.comm.arithmetic import Op, divide_, reduce_into
from farandole.comm.choice import cheapest
from farandole.comm.meter import Meter
from farandole.comm.queue import Queue
from farandole.comm.transports.base import NATIVE, Transport
from farandole.comm.transports.claims import (
    CLAIM_BYTES,
    decode_claim,
    encode_claim,
    require_agreement,
)
from farandole.comm.transports.messages import Message, PeerLost, numbered
from farandole.comm.transports.network import Network
from farandole.comm.transports.shm.transport import SharedMemory
from farandole.comm.transports.subset import Subset
from farandole.schedule import Link, piece, piece_bounds
from farandole.topology import Topology

_BLOCK_BYTES = 4 * 2**20


class _Agreement(NamedTuple):
    """Claims on their way: whether this host's are the same, and a wait for everybody's."""

    here: bool
    claims: Callable[[], list[str]]


class Hosts(Transport):
    """`world` between all ranks; `local` between those of this host, in the topology's order."""

    name = "hosts"
    native_is_fastest = True

    def __init__(self, world: Network, local: Transport, topology: Topology) -> None:
        super().__init__(world.rank, world.size, world.timeout, topology)
        self._world = world
        self._local = local
        self._here = topology.host(self.rank).ranks
        self._pieces = max(len(host.ranks) for host in topology.hosts)
        # Block i takes stream i modulo 2 on all ranks, and each stream is one thread. So within a
        # stream all ranks exchange blocks in the same order, and the tag of `beside` keeps the two
        # streams apart.
        self._streams = [
            (Queue(Meter()), _lanes(carrier, topology)) for carrier in (world, world.beside())
        ]  # the meters are for show: whoever waits for us is metered

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        # The messages to other hosts are started first and awaited last, so that the network works
        # while this thread copies through shared memory.
        finish = self._world.begin(
            [message for message in sends if message[0] not in self._here],
            [message for message in receives if message[0] not in self._here],
        )
        with numbered(self._here):
            self._local.exchange(
                [(self._here.index(peer), t) for peer, t in sends if peer in self._here],
                [(self._here.index(peer), t) for peer, t in receives if peer in self._here],
            )
        finish()

    def all_reduce(self, flat: torch.Tensor, op: Op, algorithm: str, claim: str | None) -> None:
        super().all_reduce(flat, op, NATIVE if algorithm == "two_level" else algorithm, claim)

    def native_all_reduce(self, flat: torch.Tensor, op: Op, claim: str | None) -> None:
        agreement = None if claim is None else self._begin_share(claim)
        blocks = flat.split(max(1, _BLOCK_BYTES // flat.itemsize))
        if agreement is not None and not agreement.here:
            require_agreement(agreement.claims())  # not before the other hosts know it too
        across: list[Callable[[], torch.Tensor]] = []
        for index, block in enumerate(blocks):
            with numbered(self._here):
                mine = self._local.reduce_scatter(block, self._counts(block.numel()), _partial(op))
            if agreement is not None and index == 0:  # 1. has changed nothing, and hidden a wait
                require_agreement(agreement.claims())
            network, lanes = self._streams[index % len(self._streams)]
            cross = partial(self._cross, lanes, mine, block.numel(), op)
            # A single block has nothing to overlap with: no thread need be woken for it.
            across.append(cross if len(blocks) == 1 else network.start(cross).wait)
        for block, reduced in zip(blocks, across, strict=True):
            mine = reduced()
            with numbered(self._here):
                block.copy_(self._local.all_gather(mine, self._counts(block.numel())))  # 3.

    def _counts(self, length: int) -> list[int]:
        """How much of a block each rank of this host has charge of: one or several pieces."""
        bounds = piece_bounds(self._pieces, length)
        runs = (piece(place, len(self._here), self._pieces) for place in range(len(self._here)))
        return [int(bounds[run.stop] - bounds[run.start]) for run in runs]

    def _cross(
        self, lanes: Mapping[int, Subset], mine: torch.Tensor, block_length: int, op: Op
    ) -> torch.Tensor:
        """Step 2, in another thread: each piece in my charge with those who have it elsewhere."""
        widths = [len(piece(index, self._pieces, block_length)) for index in lanes]
        for lane, part in zip(lanes.values(), mine.split(widths), strict=True):
            with numbered(lane.ranks):
                self._all_reduce_across(lane, part, _partial(op))
        divide_(mine, op, self.size)
        return mine

    def _all_reduce_across(self, lane: Subset, part: torch.Tensor, op: Op) -> None:
        """By the cheapest schedule, or, if little is sent, all to all at once: one round."""
        # The ranks of a host share its link.
        link = Link(self.link.seconds_per_message, self.link.seconds_per_byte * self._pieces)
        at_once = (lane.size - 1) * (link.seconds_per_message + part.nbytes * link.seconds_per_byte)
        name, seconds = cheapest(lane.size, part.nbytes, link)
        if at_once <= seconds:
            everyones = lane.all_gather(part, [part.numel()] * lane.size)
            reduce_into(part, everyones.view(lane.size, -1).unbind(), op)
        else:
            lane.all_reduce(part, op, name, None)

    def share(self, claim: str) -> list[str]:
        return self._begin_share(claim).claims()

    def _begin_share(self, claim: str) -> _Agreement:
        """First in the host; then every rank tells its counterparts what it has learned there."""
        with numbered(self._here):
            here = self._local.share(claim)
        frames = b"".join(encode_claim(text) for text in here)
        mine = torch.frombuffer(bytearray(frames), dtype=torch.uint8)
        heard = {self.rank: mine}
        _, lanes = self._streams[0]
        for lane in lanes.values():  # each of them has one rank of every host
            for peer in lane.ranks:
                count = len(self.topology.host(peer).ranks) * CLAIM_BYTES
                # Every lane has one rank of each host, and a rank knows the claims of its whole
                # host. So to hear this rank's counterparts is to hear all ranks.
                heard.setdefault(peer, torch.empty(count, dtype=torch.uint8))
        others = [peer for peer in heard if peer != self.rank]
        finish = self._world.begin(
            [(peer, mine) for peer in others], [(peer, heard[peer]) for peer in others]
        )

        def claims() -> list[str]:
            finish()
            by_rank: dict[int, str] = {}
            for peer, everything in heard.items():
                rows = everything.view(-1, CLAIM_BYTES)
                for rank, row in zip(self.topology.host(peer).ranks, rows, strict=True):
                    by_rank[rank] = decode_claim(row.numpy().tobytes())
            return [by_rank[rank] for rank in range(self.size)]

        return _Agreement(here.count(here[0]) == len(here), claims)

    def broadcast(self, flat: torch.Tensor, source: int) -> None:
        """To one rank of every host, then inside each."""
        heads = [source if source in host.ranks else host.ranks[0] for host in self.topology.hosts]
        if self.rank in heads:
            lane = Subset(self._world, heads)
            with numbered(heads):
                # The source stands for its own host, so that its copy need not travel inside the
                # host first.
                lane.broadcast(flat, heads.index(source))
        head = next(head for head in heads if head in self._here)
        with numbered(self._here):
            self._local.broadcast(flat, self._here.index(head))

    def subgroup(self, ranks: Sequence[int]) -> Transport:
        names = [self.topology.host(rank).name for rank in ranks]
        return over_hosts(self._world.subgroup(ranks), Topology.from_names(names))

    def channel(self, ranks: Sequence[int]) -> Transport:
        if all(rank in self._here for rank in ranks):
            return self._local.channel([self._here.index(rank) for rank in ranks])
        return self.subgroup(ranks)

    def blame(self, lost: PeerLost) -> PeerLost:
        return self._world.blame(lost)

    def interrupt(self) -> None:
        self._world.interrupt()

    def abandon(self) -> None:
        self._local.abandon()
        self._world.abandon()

    def close(self) -> None:
        self._local.close()
        self._world.close()


def over_hosts(world: Network, topology: Topology) -> Transport:
    """The fastest transport for ranks that sit like this. All of them must call it.

    Warns once, and goes on without shared memory, where a host does not allow it.
    """
    here = topology.host(world.rank).ranks
    local: Transport = Subset(world, here)
    trouble = ""
    if len(here) > 1:
        try:
            local = SharedMemory.connect(local)
        except OSError as error:
            trouble = str(error)
    # On all hosts alike, so that all ranks run the same algorithms.
    troubles = [text for text in world.share(trouble) if text]
    if troubles:
        if world.rank == 0:
            warnings.warn(
                f"no shared memory between the ranks of a host: {troubles[0]}. They use gloo, "
                "which is several times slower. Allow memfd_create and /proc/<pid>/fd in the "
                "container, run all ranks of a host in one, and lift `ulimit -f`.",
                stacklevel=2,
            )
        world.topology = topology
        return world
    if len(topology.hosts) == 1:
        return local
    if len(topology.hosts) == topology.size:
        world.topology = topology
        return world
    return Hosts(world, local, topology)


def _lanes(world: Network, topology: Topology) -> dict[int, Subset]:
    """The pieces in this rank's charge, and for each the ranks that have charge of it, by host.

    The vector has as many pieces as the largest host has ranks; in smaller hosts some ranks have
    charge of several.
    """
    pieces = max(len(host.ranks) for host in topology.hosts)
    in_charge = [
        [rank for i, rank in enumerate(host.ranks) for _ in piece(i, len(host.ranks), pieces)]
        for host in topology.hosts
    ]
    columns = {index: [charge[index] for charge in in_charge] for index in range(pieces)}
    return {index: Subset(world, ranks) for index, ranks in columns.items() if world.rank in ranks}


def _partial(op: Op) -> Op:
    """An average is a sum until all are in."""
    return "sum" if op == "average" else op

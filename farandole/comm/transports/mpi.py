"""MPI through mpi4py: for jobs that mpirun starts, over whatever network their MPI knows.

Only buffers travel, nothing is pickled. MPI has no time limits, so nothing here blocks: whatever
can be late is a request that is asked again and again whether it is done.

When a rank is late, the others must find out which, and MPI has no word for that either:

    rank 0    waits for 2 ─ ─ ─ ─ ─ ─ ─ ─ ▶ time is up: tells all whom it waited for
    rank 1    stopped
    rank 2    waits for 1 ─ ─ ─ ─ ─ ─ ─ ─ ─ ▶ hears rank 0, gives up too, tells all

Rank 0 follows the trail: it waited for 2, which waited for 1, which says nothing.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from farandole.comm.arithmetic import Op, divide_
from farandole.comm.failure_evidence import who_is_missing
from farandole.comm.transports.base import Transport
from farandole.comm.transports.messages import Message, PeerLost
from farandole.topology import Topology

if TYPE_CHECKING:
    from mpi4py import MPI

_DATA, _GAVE_UP = 1, 2  # tags
_MOST_BYTES = 2**30  # in one message: MPI counts with an int
# While the bytes themselves take time, MPI moves them only when asked, so we ask all the time.
# After that somebody is late, and the processor is better left to them.
_SPIN_SECONDS = 2e-3
_SLOWEST_BYTES_PER_SECOND = 500e6
_LONGEST_SLEEP_SECONDS = 1e-3
# Open MPI's own all-reduce without blocking is made for small vectors; beyond this a ring of
# messages is faster.
_MOST_REDUCED_BYTES = 2**21
_REDUCES = {  # halves are foreign to MPI
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8,
}  # fmt: skip


class Mpi(Transport):
    """A transport over a communicator that nobody else uses. `mpi_world` makes one."""

    name = "mpi"
    native_is_fastest = True

    def __init__(
        self, communicator: MPI.Intracomm, timeout: timedelta, topology: Topology | None = None
    ) -> None:
        super().__init__(communicator.rank, communicator.size, timeout, topology)
        from mpi4py import MPI

        self._mpi = MPI
        self._communicator = communicator
        self._ops = {
            "sum": MPI.SUM,
            "average": MPI.SUM,
            "min": MPI.MIN,
            "max": MPI.MAX,
            "product": MPI.PROD,
        }
        self._open = True

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        waits = Waits(sum(data.nbytes for _, data in [*sends, *receives]))
        for peer, into in receives:
            for part in _parts(into.view(torch.uint8)):
                waits.add(self._communicator.Irecv(part, peer, _DATA), [peer])
        for peer, data in sends:
            for part in _parts(data.view(torch.uint8)):
                waits.add(self._communicator.Isend(part, peer, _DATA), [peer])
        self.finish(waits)

    def native_all_reduce(self, flat: torch.Tensor, op: Op, claim: str | None) -> None:
        if flat.dtype not in _REDUCES or flat.nbytes > _MOST_REDUCED_BYTES:
            super().native_all_reduce(flat, op, claim)
            return
        if claim is not None:
            self.agree(claim)
        # A bool is a byte that is 0 or 1, and stays one under min, max and product.
        numbers = flat.view(torch.uint8) if flat.dtype == torch.bool else flat
        waits = Waits(flat.nbytes)
        for part in _parts(numbers):
            request = self._communicator.Iallreduce(self._mpi.IN_PLACE, part, self._ops[op])
            waits.add(request, self.others)
        self.finish(waits)
        divide_(flat, op, self.size)

    def broadcast(self, flat: torch.Tensor, source: int) -> None:
        waits = Waits(flat.nbytes)
        for part in _parts(flat.view(torch.uint8)):
            waits.add(self._communicator.Ibcast(part, source), self.others)
        self.finish(waits)

    def subgroup(self, ranks: Sequence[int]) -> Mpi:
        # Making a communicator takes all its ranks and has no time limit. So they meet first, which
        # names those that do not come; one that is lost right after is left to a thread.
        peers = [rank for rank in ranks if rank != self.rank]
        here = torch.zeros(1, dtype=torch.uint8)
        self.exchange([(peer, here) for peer in peers], [(peer, here.clone()) for peer in peers])
        made: list[MPI.Intracomm] = []

        def make() -> None:
            members = self._communicator.Get_group().Incl(list(ranks))
            made.append(self._communicator.Create_group(members))

        maker = threading.Thread(target=make, name="mpi-subgroup", daemon=True)
        maker.start()
        maker.join(self.timeout.total_seconds())
        if not made:
            self._give_up()
            raise PeerLost.late(peers, self.timeout.total_seconds())
        hosts = [self.topology.host(rank).name for rank in ranks]
        return Mpi(made[0], self.timeout, Topology.from_names(hosts))

    def close(self) -> None:
        if self._open:
            self._open = False
            self._communicator.Free()

    # Waiting

    def finish(self, waits: Waits) -> None:
        """Returns when all requests are done. Raises `PeerLost`."""
        begin = time.monotonic()
        try:
            # Testall also makes MPI move bytes. There is no thread in MPI that would do so
            # meanwhile.
            while not self._mpi.Request.Testall(waits.requests):
                seconds = time.monotonic() - begin
                if seconds < waits.spin_seconds:
                    os.sched_yield()
                    continue
                if seconds > self.timeout.total_seconds() or self._somebody_gave_up():
                    self._give_up(waits)
                    raise PeerLost.late(waits.late_peers(), self.timeout.total_seconds())
                time.sleep(min(seconds / 50, _LONGEST_SLEEP_SECONDS))
        except self._mpi.Exception as error:
            self._give_up(waits)
            said = error.Get_error_string()
            raise PeerLost(waits.peers(), f"cannot be talked to (MPI says: {said})") from error

    def _somebody_gave_up(self) -> bool:
        return self._communicator.Iprobe(self._mpi.ANY_SOURCE, _GAVE_UP)

    def blame(self, lost: PeerLost) -> PeerLost:
        board = _MessageBoard(self._communicator)
        missing = who_is_missing(board, self.rank, lost.ranks)
        self._give_up(board)
        return lost.naming(missing)

    def _give_up(self, kept: object = None) -> None:
        """Sees to it that this process can still end, and that nobody writes where nothing is.

        MPI_Finalize waits for every rank, so after a loss it would never return. mpi4py can call
        MPI_Abort in its place, at the very end of the process: whatever this rank still wants to
        write is written by then, and mpirun ends the others, the stopped one too.

        A request that is not done cannot be taken back for sure. If the late rank goes on after
        all, its bytes still arrive; so what is `kept`, requests and buffers, outlives everything.
        """
        from mpi4py.run import set_abort_status

        set_abort_status(1)
        self._open = False
        atexit.register(lambda kept: None, kept)


class Waits:
    """Requests under way, for so many bytes, and whom each of them waits for."""

    def __init__(self, nbytes: int) -> None:
        self.requests: list[MPI.Request] = []
        self.spin_seconds = _SPIN_SECONDS + nbytes / _SLOWEST_BYTES_PER_SECOND
        self._peers: list[Sequence[int]] = []

    def add(self, request: MPI.Request, peers: Sequence[int]) -> None:
        self.requests.append(request)
        self._peers.append(peers)

    def peers(self) -> list[int]:
        return sorted({peer for peers in self._peers for peer in peers})

    def late_peers(self) -> list[int]:
        waits = zip(self.requests, self._peers, strict=True)
        return sorted({peer for request, peers in waits if not request.Test() for peer in peers})


class _MessageBoard:
    """A `Board` of messages: every rank writes to every other."""

    def __init__(self, communicator: MPI.Intracomm) -> None:
        self._communicator = communicator
        self._statements: dict[int, list[int]] = {}
        self._others = [rank for rank in range(communicator.size) if rank != communicator.rank]
        self._received = {rank: np.zeros(communicator.size, np.uint8) for rank in self._others}
        # The receives are posted before this rank sends its own statement: a large world's messages
        # must find their buffers.
        self._coming = {
            rank: communicator.Irecv(statement, rank, _GAVE_UP)
            for rank, statement in self._received.items()
        }
        self._going: list[MPI.Request] = []

    def write(self, waited_for: Sequence[int]) -> None:
        self._statements[self._communicator.rank] = list(waited_for)
        statement = np.zeros(self._communicator.size, np.uint8)
        statement[list(waited_for)] = 1
        self._going += [
            self._communicator.Isend(statement, rank, _GAVE_UP) for rank in self._others
        ]

    def read(self) -> dict[int, list[int]]:
        for rank in [rank for rank, request in self._coming.items() if request.Test()]:
            del self._coming[rank]
            self._statements[rank] = np.flatnonzero(self._received[rank]).tolist()
        return self._statements


def _parts(flat: torch.Tensor) -> Iterator[np.ndarray[Any, Any]]:
    """As arrays that MPI can count."""
    for part in flat.split(max(_MOST_BYTES // flat.element_size(), 1)):
        if part.numel():
            yield part.numpy()

"""The workers of a job under parameter servers, as a group: they meet through the registrar.

What a run says among its ranks besides training is little: numbers to add up, a barrier, names. It
goes through the registrar, which knows who lives. So a worker that dies is only missed: sums go
without it, and where one value of each rank is wanted, the first living rank's stands in for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import timedelta

import torch

from farandole.comm.arithmetic import Op, reduce_into
from farandole.comm.transports.base import NEVER, Transport
from farandole.comm.transports.claims import require_agreement
from farandole.comm.transports.messages import Message, PeerLost, name_ranks
from farandole.errors import CommError, UserError
from farandole.server.client.store import Store
from farandole.topology import Topology


class RegistrarTransport(Transport):
    """One worker's end. The store is there for strategies that use the servers."""

    name = "servers"
    native_is_fastest = True
    may_join_late = True

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        topology: Topology | None = None,
        *,
        late: bool = False,
    ) -> None:
        super().__init__(rank, size, timeout, topology)
        self.store = store
        self.joined_late = late
        self._entered = False
        self._mark = ""
        self._count = itertools.count()
        self._is_lent = False

    def lend_store(self) -> Store:
        """To a strategy. There can be only one: the clocks count the steps of one model."""
        if self._is_lent:
            raise UserError(
                "a job under parameter servers (--servers) trains one model, and this is the "
                "second. Put both into one module with one optimizer, or choose the strategy in "
                "the script (run.distribute(…, sync=…)) and leave out --sync and --servers."
            )
        self._is_lent = True
        return self.store

    def begin_epoch(self, epoch: int) -> int:
        """A worker that was started again begins with the next epoch, not with the first."""
        if self.joined_late and not self._entered:
            self._entered = True
            mark = self.store.registrar_client.enter()
            epoch = int(mark) if mark is not None else NEVER
        elif self.rank == 0:
            self.store.registrar_client.announce(str(epoch))
        # Meetings are named by epoch and count. A worker that enters here counts from 0 like the
        # others, and so its first meeting is theirs.
        self._mark, self._count = str(epoch), itertools.count()
        return epoch

    def _meet(self, payload: bytes) -> dict[int, bytes]:
        return self.store.meet(f"{self._mark}/{next(self._count)}", payload)

    def _everyones(self, payload: bytes) -> list[bytes]:
        """By rank; the first living rank's in place of those who are gone."""
        given = self._meet(payload)
        first = given[min(given)]
        return [given.get(rank, first) for rank in range(self.size)]

    def share(self, claim: str) -> list[str]:
        return [given.decode() for given in self._everyones(claim.encode())]

    def native_all_reduce(self, flat: torch.Tensor, op: Op, claim: str | None) -> None:
        if claim is not None:
            self.agree(claim)
        given = self._meet(_bytes(flat))
        # In rank order, over those who gave: all ranks got the same contributions, and so the same
        # bits. An average is over as many as gave.
        reduce_into(flat, [_tensor(given[rank], flat) for rank in sorted(given)], op)

    def all_gather(self, mine: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        parts = [_tensor(given, mine) for given in self._everyones(_bytes(mine))]
        lengths = [part.numel() for part in parts]
        gone = [rank for rank in range(self.size) if lengths[rank] != counts[rank]]
        if gone:
            raise CommError(f"{name_ranks(gone)} died after saying how much it had to give")
        return torch.cat(parts)

    def broadcast(self, flat: torch.Tensor, source: int) -> None:
        given = self._meet(_bytes(flat) if self.rank == source else b"")
        if source not in given:
            raise PeerLost([source], "has died, and what it had to say with it")
        flat.copy_(_tensor(given[source], flat))

    def reduce_scatter(self, flat: torch.Tensor, counts: Sequence[int], op: Op) -> torch.Tensor:
        whole = flat.clone()
        self.native_all_reduce(whole, op, None)
        pieces: tuple[torch.Tensor, ...] = whole.split(list(counts))
        return pieces[self.rank]

    def agree(self, claim: str) -> None:
        require_agreement(self.share(claim))

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        raise UserError(
            "workers under parameter servers (--servers) send nothing to one another. Strategies "
            "and scripts that do run without --servers."
        )

    def subgroup(self, ranks: Sequence[int]) -> Transport:
        raise UserError(
            "workers under parameter servers (--servers) form no subgroups. Strategies and scripts "
            "that do run without --servers."
        )

    def close(self) -> None:
        self.store.close()


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _tensor(data: bytes, like: torch.Tensor) -> torch.Tensor:
    if not data:
        return like.new_empty(0)
    return torch.frombuffer(bytearray(data), dtype=like.dtype).to(like.device)

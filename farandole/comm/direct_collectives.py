"""The collectives of a group, carried out at once in the calling thread.

A `Transport` moves flat tensors between ranks that are known to do the same. What is added here, to
every collective: tensors of any shape and layout, the choice of algorithm, the claim by which ranks
that do different things are found out, the trace, and the bytes that count.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

from farandole.comm.arithmetic import Op
from farandole.comm.choice import choose
from farandole.comm.collective_scope import CollectiveScopes
from farandole.comm.meter import Meter, ring_bytes
from farandole.comm.tensors import claim_of, flat_view, kind_of, put_back
from farandole.comm.transports.base import Transport
from farandole.comm.transports.claims import DisagreementError
from farandole.schedule import piece


class DirectCollectives:
    """One rank's collectives. Whoever calls them sees to their order: see `Group`."""

    def __init__(self, transport: Transport, meter: Meter, scopes: CollectiveScopes) -> None:
        self.transport = transport
        self.rank = transport.rank
        self.size = transport.size
        self.meter = meter
        self.scopes = scopes

    def all_reduce(
        self, tensor: torch.Tensor, op: Op, algorithm: str, agreed: bool
    ) -> torch.Tensor:
        """`agreed`: the shapes are known to be the same, so that no claims need be compared."""
        transport, nbytes = self.transport, tensor.nbytes
        carrier = transport.carrier(tensor)
        chosen = choose(carrier, nbytes, algorithm, cuda=tensor.is_cuda)
        if self.size == 1:
            return tensor
        flat = flat_view(tensor)
        claim = None if agreed else self._claim("all_reduce", tensor, op, chosen)
        with self.scopes.enter("all_reduce", nbytes, chosen, by=carrier.name):
            transport.all_reduce(flat, op, chosen, claim)
        self.meter.add_bytes(ring_bytes(nbytes, self.size))
        return put_back(flat, tensor)

    def reduce_scatter(self, tensor: torch.Tensor, op: Op) -> torch.Tensor:
        rows = [len(piece(rank, self.size, tensor.shape[0])) for rank in range(self.size)]
        width = tensor[:1].numel()
        flat = flat_view(tensor)
        with self.scopes.enter("reduce_scatter", flat.nbytes):
            self.transport.agree(self._claim("reduce_scatter", tensor, op))
            result = self.transport.reduce_scatter(flat, [count * width for count in rows], op)
        self.meter.add_bytes(flat.nbytes - result.nbytes)
        return result.view(rows[self.rank], *tensor.shape[1:])

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        mine = flat_view(tensor)
        with self.scopes.enter("all_gather", mine.nbytes):
            shapes = self._shapes(tensor)
            counts = [torch.Size(shape).numel() for shape in shapes]
            everything = self.transport.all_gather(mine, counts)
        self.meter.add_bytes(mine.nbytes * (self.size - 1))
        return [
            part.view(shape) for part, shape in zip(everything.split(counts), shapes, strict=True)
        ]

    def broadcast(self, tensor: torch.Tensor, source: int, agreed: bool) -> torch.Tensor:
        flat = flat_view(tensor)
        with self.scopes.enter("broadcast", flat.nbytes):
            if not agreed:
                self.transport.agree(self._claim("broadcast", tensor, f"from rank {source}"))
            self.transport.broadcast(flat, source)
        if self.rank == source and self.size > 1:
            self.meter.add_bytes(flat.nbytes)
        return put_back(flat, tensor)

    def all_to_all(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        flats = [flat_view(tensor) for tensor in tensors]
        row = tensors[0].shape[1:]
        sent = sum(flat.nbytes for rank, flat in enumerate(flats) if rank != self.rank)
        with self.scopes.enter("all_to_all", sent):
            what = [
                f"{tensors[0].dtype} in rows of {tuple(row)}",
                *self.transport.place_of(tensors[0]),
            ]
            self.transport.agree(f"all_to_all({', '.join(what)})")
            lengths = torch.tensor([tensor.shape[0] if tensor.dim() else 1 for tensor in tensors])
            table = self.transport.all_gather(lengths, [self.size] * self.size)
            incoming = table.view(self.size, self.size)[:, self.rank].tolist()
            result = [tensors[0].new_empty((count, *row)) for count in incoming]
            self.transport.all_to_all(flats, [flat_view(tensor) for tensor in result])
        self.meter.add_bytes(sent)
        return result

    def barrier(self) -> None:
        with self.scopes.enter("barrier", 0):
            self.transport.agree("barrier()")

    def send(self, flat: torch.Tensor, to: int) -> None:
        with self.scopes.enter(f"send to rank {to}", flat.nbytes):
            self.transport.exchange([(to, flat)], [])

    def receive(self, flat: torch.Tensor, source: int) -> None:
        with self.scopes.enter(f"receive from rank {source}", flat.nbytes):
            self.transport.exchange([], [(source, flat)])

    def _claim(self, what: str, tensor: torch.Tensor, *details: str) -> str:
        return claim_of(what, tensor, *details, *self.transport.place_of(tensor))

    def _shapes(self, tensor: torch.Tensor) -> list[tuple[int, ...]]:
        """Every rank's shape, when all gather tensors of one dtype."""
        begin = (
            f"all_gather({' '.join([kind_of(tensor.dtype), *self.transport.place_of(tensor)])} ["
        )
        claims = self.transport.share(f"{begin}{', '.join(map(str, tensor.shape))}])")
        for rank, claim in enumerate(claims):
            if not claim.startswith(begin):
                raise DisagreementError(claims, self.rank, rank)
        return [tuple(json.loads(f"[{claim[len(begin) : -1]}")) for claim in claims]

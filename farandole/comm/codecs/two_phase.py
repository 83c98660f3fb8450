"""The parameter-server all-reduce, compressed both ways.

Each tensor is cut into as many rows as there are ranks, and each rank owns one row. What is not
compressed travels along.

                rank 0           rank 1           rank 2
    1. encode   a0 b0 c0         a1 b1 c1         a2 b2 c2     three rows each
    2. send     a1, a2 arrive    b0, b2 arrive    c0, c1 arrive
    3. decode   a0 + a1 + a2     b0 + b1 + b2     c0 + c1 + c2
    4. encode   A                B                C
    5. send     A B C            A B C            A B C        and every rank decodes the same

So a rank sends 2(p−1)/p of the encoded tensor, however many ranks there are, and numbers are added
in full precision. Rounding happens twice: at the sender, in step 1, and at the owner, in step 4.
Each of them remembers its own error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from farandole.comm.codecs.codec import Codec
from farandole.comm.codecs.compressor import (
    LEFT,
    Compressor,
    Contribution,
    Outcome,
    join,
    split,
    to_precise,
)
from farandole.comm.codecs.wire import Column, pack, packed_bytes, pad_end, unpack
from farandole.comm.group import Group

_OWNED_LEFT = "owned_left"  # what this rank has not passed on yet, of the row it owns


class Coder(Protocol):
    """Numbers as fewer bytes, row by row. A row with an inf or NaN comes back as NaN."""

    def columns(self, count: int, precise: torch.dtype) -> Sequence[Column]:
        """What a row of `count` numbers of dtype `precise` becomes."""

    def encode(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        """The columns."""

    def decode(self, columns: Sequence[torch.Tensor], count: int) -> torch.Tensor:
        """Rows of `count` numbers, nearly those that were encoded."""


def two_phase_bytes(coder: Coder, count: int, itemsize: int, ranks: int) -> int:
    """Bytes that each rank sends to average a tensor of `count` elements."""
    precise = torch.float64 if itemsize == 8 else torch.float32
    row = packed_bytes(coder.columns(_row_length(count, ranks), precise))
    return 2 * (ranks - 1) * row


@dataclass(frozen=True)
class _Stream:
    """One tensor on its way: rows to encode, and how."""

    coder: Coder
    rows: torch.Tensor  # one for each rank; zeros fill up the last
    count: int
    owned_left: torch.Tensor | None = None

    @classmethod
    def of(
        cls, coder: Coder, values: torch.Tensor, size: int, owned_left: torch.Tensor | None = None
    ) -> _Stream:
        count, length = values.numel(), _row_length(values.numel(), size)
        rows = pad_end(values, size * length - count).view(size, length)
        return cls(coder, rows, count, owned_left)

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        return pack(*self.coder.encode(rows))

    def decode(self, encoded: torch.Tensor) -> torch.Tensor:
        length = self.rows.shape[1]
        columns = unpack(encoded, self.coder.columns(length, self.rows.dtype))
        return self.coder.decode(columns, length)

    def add_up(self, received: torch.Tensor, rank: int) -> torch.Tensor:
        """The row that `rank` owns: all contributions, in rank order, and what it still had."""
        contributions = self.decode(received)
        total: torch.Tensor = contributions[:1].clone()
        for row in contributions[1:]:
            total += row
        # A coder need not keep the zeros that fill up the last row.
        total[:, max(self.count - rank * total.shape[1], 0) :] = 0
        if self.owned_left is not None:
            total += self.owned_left
        return total


class TwoPhase(Compressor):
    def __init__(self, codec: Codec, coder: Coder, *, feedback: bool, algorithm: str) -> None:
        super().__init__(codec, algorithm)
        self.coder = coder
        self._feedback = feedback

    def _sum(
        self, parts: Mapping[str, Contribution], raw: Sequence[torch.Tensor], group: Group
    ) -> tuple[dict[str, Outcome], list[torch.Tensor]]:
        as_it_is = join(raw)
        streams = [
            _Stream.of(self.coder, part.values, group.size, part.memory.get(_OWNED_LEFT))
            for part in parts.values()
        ] + [
            _Stream.of(_AsItIs(dtype), to_precise(flat), group.size)
            for dtype, flat in as_it_is.items()
        ]
        if not streams:
            return {}, []
        sent = [stream.encode(stream.rows) for stream in streams]
        received = _cut(group.all_to_all(list(torch.cat(sent, dim=1).cpu())), sent)
        owned = [
            stream.add_up(rows, group.rank) for stream, rows in zip(streams, received, strict=True)
        ]
        answers = [stream.encode(row) for stream, row in zip(streams, owned, strict=True)]
        gathered = _cut(group.all_gather(torch.cat(answers, dim=1)[0].cpu()), answers)
        totals = [
            stream.decode(rows).reshape(-1)[: stream.count]
            for stream, rows in zip(streams, gathered, strict=True)
        ]
        outcomes = {}
        for index, name in enumerate(parts):
            stream, memory = streams[index], {}
            if self._feedback:
                left = stream.rows.sub_(stream.decode(sent[index]))
                memory[LEFT] = left.view(-1)[: stream.count]
                # Decoded from the bytes that were sent, not from the numbers behind them: the
                # memory must be what the other ranks really did not get.
                memory[_OWNED_LEFT] = owned[index].sub_(stream.decode(answers[index]))[0]
            outcomes[name] = Outcome(totals[index], memory)
        return outcomes, split(dict(zip(as_it_is, totals[len(parts) :], strict=True)), raw)


class _AsItIs:
    """For what is not compressed."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def columns(self, count: int, precise: torch.dtype) -> Sequence[Column]:
        return [(self._dtype, count)]

    def encode(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        return [rows.to(self._dtype)]

    def decode(self, columns: Sequence[torch.Tensor], count: int) -> torch.Tensor:
        return to_precise(columns[0])


def _row_length(count: int, ranks: int) -> int:
    return -(-count // ranks)


def _cut(
    messages: Sequence[torch.Tensor], like: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """What came from each rank in a row, cut into the streams again."""
    rows = torch.stack(list(messages)).to(like[0].device)
    cut: tuple[torch.Tensor, ...] = rows.split([encoded.shape[1] for encoded in like], dim=1)
    return cut

"""Values as fewer bytes: the codecs of `farandole.comm`, between one client and one server.

There they serve all ranks of a group at once. Here one sends and one receives, so only those will
do that turn numbers into bytes alone. All numbers of a push are one row to them.

What a codec leaves out of a row's push is added to the row's next one, if its `feedback` says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from farandole.comm.codecs import CODECS, Codec, TopK
from farandole.comm.codecs import parse as parse_any_codec
from farandole.comm.codecs.compressor import to_precise
from farandole.comm.codecs.topk import largest_places
from farandole.comm.codecs.two_phase import Coder, TwoPhase
from farandole.comm.codecs.wire import Column, pack, packed_bytes, unpack
from farandole.comm.tensors import is_finite
from farandole.errors import UserError
from farandole.server.filters.residual import Residual, Which
from farandole.server.filters.savings import Savings


def parse_codec(text: str) -> Codec:
    """The codec that `text` describes. Raises `UserError` if there is none, or it needs a group."""
    codec = parse_any_codec(text)
    if _coder_of(codec) is None:
        usable = sorted(name for name, kind in CODECS.items() if _coder_of(kind()) is not None)
        raise UserError(
            f"the codec {codec.name!r} needs all ranks at once, and a parameter server hears one "
            f"worker at a time. Usable here: {', '.join(usable)}."
        )
    return codec


def encode(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    """As bytes: encoded if that makes fewer of them, else `values` themselves, not a copy.

    If there is an inf or NaN among them, there is one among what is decoded.
    """
    count = values.numel()
    if not _is_worth_it(codec, count, values.dtype):
        return values.contiguous().view(-1).view(torch.uint8)
    row = to_precise(values).reshape(1, count)
    return pack(*_need_coder(codec).encode(row))[0]


def decode(
    codec: Codec, encoded: torch.Tensor, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """The values again, nearly. Raises `UserError` if these cannot be their bytes."""
    count = math.prod(shape)
    if encoded.numel() != coded_bytes(codec, count, dtype):
        raise UserError(
            f"{tuple(shape)} of {dtype} take {coded_bytes(codec, count, dtype)} bytes under the "
            f"codec {codec}, and {encoded.numel()} came. Both ends must use the same codec."
        )
    if encoded.data_ptr() % dtype.itemsize:
        encoded = encoded.clone()  # bytes may arrive anywhere in memory, numbers may not lie there
    if not _is_worth_it(codec, count, dtype):
        return encoded.view(dtype).view(*shape)
    coder = _need_coder(codec)
    columns = unpack(encoded.unsqueeze(0), coder.columns(count, _precise(dtype)))
    return coder.decode(columns, count).to(dtype).view(*shape)


def coded_bytes(codec: Codec, count: int, dtype: torch.dtype) -> int:
    """Bytes of `count` numbers. Both ends know it, so no message need say what was encoded."""
    columns = _need_coder(codec).columns(count, _precise(dtype)) if count else ()
    return min(packed_bytes(columns), count * dtype.itemsize)


class Coding:
    """A codec at work on the pushes of one client to one table."""

    def __init__(self, codec: Codec, rows: int, width: int, dtype: torch.dtype) -> None:
        if not dtype.is_floating_point:
            raise UserError(
                f"the codec {codec} takes floating-point tables; this one is {dtype}. Use none "
                "here."
            )
        _need_coder(codec)
        self.codec = codec
        self.savings = Savings()
        """Of the values alone: their row numbers travel as they are, or as `key_cache` has it."""
        self._rows = rows
        self._width = width
        self._dtype = dtype
        self._residual = Residual(rows, width, dtype) if getattr(codec, "feedback", False) else None

    def encode(self, rows: Which | None, values: torch.Tensor) -> torch.Tensor:
        """The bytes to send for these rows, sorted and each once (None: all of the table)."""
        rows = slice(0, self._rows) if rows is None else rows
        total = values if self._residual is None else self._residual.plus(rows, values)
        encoded = encode(self.codec, total)
        if self._residual is not None:
            left = total - decode(self.codec, encoded, total.shape, total.dtype)
            if is_finite(left):  # what is not leaves no trace
                self._residual.replace(rows, left)
        self.savings.rows_offered += len(values)
        self.savings.rows_sent += len(values)
        self.savings.bytes_offered += values.nbytes
        self.savings.bytes_sent += encoded.nbytes
        return encoded

    def flush(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All that was left out until now: rows and values, to send as they are."""
        if self._residual is None:
            nothing = torch.empty(0, self._width, dtype=self._dtype)
            return torch.empty(0, dtype=torch.int64), nothing
        rows, values = self._residual.take()
        self.savings.rows_sent += len(rows)
        self.savings.bytes_sent += values.nbytes
        return rows, values

    def state_dict(self) -> dict[str, Any]:
        """What must be saved to go on as if never stopped."""
        return {} if self._residual is None else self._residual.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._residual is not None:
            self._residual.load_state_dict(state)


class _TopKCoder:
    """The places and values of the largest numbers, in the order of the places."""

    def __init__(self, codec: TopK) -> None:
        self._codec = codec

    def columns(self, count: int, precise: torch.dtype) -> Sequence[Column]:
        return self._codec.columns(count, precise)

    def encode(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        (numbers,) = rows
        count = numbers.numel()
        places = largest_places(numbers.abs(), self._codec.kept(count)).sort().values
        (place_dtype, _), _ = self.columns(count, numbers.dtype)
        return [places.to(place_dtype).unsqueeze(0), numbers[places].unsqueeze(0)]

    def decode(self, columns: Sequence[torch.Tensor], count: int) -> torch.Tensor:
        places, values = columns
        if not 0 <= int(places.min()) <= int(places.max()) < count:
            raise UserError(f"places of a push must be below {count}; {int(places.max())} is not.")
        return values.new_zeros(1, count).scatter_(1, places.long(), values)


def _coder_of(codec: Codec) -> Coder | None:
    if isinstance(codec, TopK):
        return _TopKCoder(codec)
    compressor = codec.build()
    return compressor.coder if isinstance(compressor, TwoPhase) else None


def _need_coder(codec: Codec) -> Coder:
    coder = _coder_of(codec)
    assert coder is not None, f"{codec} came past parse_codec"
    return coder


def _is_worth_it(codec: Codec, count: int, dtype: torch.dtype) -> bool:
    return coded_bytes(codec, count, dtype) < count * dtype.itemsize


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)

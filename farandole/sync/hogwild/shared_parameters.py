"""A model's parameters in memory that all ranks of a host read and write.

Rank 0 creates the memory, an anonymous file, and copies its parameters into it. The other ranks
open it through /proc. Every rank's parameters then live there: the tensors stay the script's own,
only their memory moves. Ranks that are threads of one process do the same, each with a mapping of
its own. The memory has no name, so nothing is left behind when the ranks are killed.

Frozen parameters move too: the script may train them later.

There are no locks and no fences. Writes to an aligned element of up to 8 bytes are not torn on the
processors that Farandole runs on, so a rank reads either the old or the new value of an element, in
any mixture over a tensor. Of two updates of an element at the same time, one may be lost.
"""

from __future__ import annotations

import os
import secrets
import struct
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from farandole.comm import Group
from farandole.comm.transports.shm.segment import Segment
from farandole.errors import CommError, UserError

_LINE_BYTES = 64  # of a cache: two parameters in one line would slow down all who write to them
_TOKEN_BYTES = 16
_SAID_BEGIN, _SAID_BYTES = _LINE_BYTES, 2048  # what a rank says to all, behind the token
_SAID_HEADER = struct.Struct("<II")  # its length and its checksum

Place = tuple[int, tuple[int, ...]]
"""Where a parameter begins, in bytes, and its strides, in elements."""


class SharedParameters:
    """The parameters of `model`, which is the same on all ranks, in shared memory.

    *Together.* Raises `CommError` on all ranks, or on none.
    """

    def __init__(self, model: nn.Module, group: Group) -> None:
        parameters = dict(model.named_parameters())
        segment, places = _connect(parameters, group)
        self._segment = segment
        self._addresses: dict[torch.Tensor, int] = {}
        self._names: dict[torch.Tensor, str] = {p: name for name, p in parameters.items()}
        for parameter, place in zip(parameters.values(), places, strict=True):
            parameter.data = _view(segment, parameter, place)
            self._addresses[parameter] = parameter.data_ptr()

    def announce(self, said: bytes) -> None:
        """Leaves a message for all ranks before this one stops. Leaves none that is too long."""
        # Nothing orders these writes, and two ranks may announce at once. The checksum covers both:
        # a reader takes a message only when all of its bytes belong together.
        if len(said) <= _SAID_BYTES - _SAID_HEADER.size:
            whole = _SAID_HEADER.pack(len(said), zlib.crc32(said)) + said
            self._segment.memory[_SAID_BEGIN : _SAID_BEGIN + len(whole)] = whole

    def announced(self) -> bytes | None:
        """What a rank has announced; None where there is nothing, or only a part of it yet."""
        length, checksum = _SAID_HEADER.unpack_from(self._segment.memory, _SAID_BEGIN)
        begin = _SAID_BEGIN + _SAID_HEADER.size
        said = self._segment.memory[begin : begin + min(length, _SAID_BYTES)]
        return said if length and zlib.crc32(said) == checksum else None

    def require(self, parameters: Iterable[torch.Tensor]) -> None:
        """Raises `UserError` when one of `parameters` is not in the shared memory (any more)."""
        for parameter in parameters:
            if self._addresses.get(parameter) == parameter.data_ptr():
                continue
            if parameter in self._names:
                raise UserError(
                    f"the parameter {self._names[parameter]!r} has left the memory that all ranks "
                    "share: something has replaced it since run.distribute, such as `p.data = …` "
                    "or `model.to(…)`. Do that before run.distribute, or write in place, as "
                    "`p.copy_(…)` does."
                )
            raise UserError(
                f"a parameter of shape {tuple(parameter.shape)} is trained that was not in the "
                "model when it was given to run.distribute, so the other ranks do not share it. "
                "Add it before, and give each model an optimizer of its own."
            )


def _connect(
    parameters: Mapping[str, nn.Parameter], group: Group
) -> tuple[Segment, Iterable[Place]]:
    """The memory, with rank 0's parameters in it, and the place of each."""
    segment: Segment | None = None
    offer: dict[str, Any] = {}
    trouble = ""
    try:
        if group.rank == 0:
            segment, offer = _make(parameters)
    except (OSError, AttributeError) as error:  # no room; or no Linux
        trouble = f"cannot make shared memory: {error}"
    offer = group.broadcast_json(offer)
    try:
        if group.rank != 0 and offer:
            segment = _open(offer)
    except (OSError, ValueError) as error:
        trouble = f"cannot open the shared memory of process {offer['pid']}: {error}"
    # A barrier too: all ranks have opened the memory by now. Only then may rank 0 close the
    # descriptor through which they find it; the mappings keep the memory alive.
    troubles = group.gather_json(trouble)
    if group.rank == 0 and segment is not None:
        os.close(segment.descriptor)
    for rank, theirs in enumerate(troubles):
        if theirs:
            raise CommError(
                f"rank {rank} {theirs}. All ranks need one Linux host and must see each other in "
                "/proc, as in one container; where they cannot, `local` trains without."
            )
    assert segment is not None
    return segment, [(begin, tuple(strides)) for begin, strides in offer["places"]]


def _make(parameters: Mapping[str, nn.Parameter]) -> tuple[Segment, dict[str, Any]]:
    places, length = _lay_out(parameters.values())
    segment = Segment.make(length, committed=length)
    token = secrets.token_bytes(_TOKEN_BYTES)
    segment.memory[:_TOKEN_BYTES] = token
    for parameter, place in zip(parameters.values(), places, strict=True):
        _view(segment, parameter, place).copy_(parameter.detach())
    return segment, {
        "pid": os.getpid(),
        "descriptor": segment.descriptor,
        "length": length,
        "token": token.hex(),
        "places": places,
    }


def _open(offer: Mapping[str, Any]) -> Segment:
    # In another PID namespace the number may belong to a process that has nothing to do with us,
    # and whose descriptor is some other memory. The token tells.
    segment = Segment.open(offer["pid"], offer["descriptor"], offer["length"])
    if segment.memory[:_TOKEN_BYTES].hex() != offer["token"]:
        raise OSError("it is another process here: not the same /proc")
    return segment


def _lay_out(parameters: Iterable[nn.Parameter]) -> tuple[list[Place], int]:
    """A place for each parameter, and the bytes that all of them take.

    The token and room for an announcement come first. Parameters that share memory keep sharing it.
    """
    places: list[Place] = []
    known: dict[tuple[int, int], int] = {}
    end = _SAID_BEGIN + _SAID_BYTES
    for parameter in parameters:
        begin = known.setdefault((parameter.data_ptr(), parameter.nbytes), end)
        if begin == end:
            end += -(-parameter.nbytes // _LINE_BYTES) * _LINE_BYTES
        # The strides of a dense copy, so that a memory format such as channels last survives.
        places.append((begin, torch.empty_like(parameter, device="meta").stride()))
    return places, end


def _view(segment: Segment, parameter: nn.Parameter, place: Place) -> torch.Tensor:
    begin, strides = place
    row = segment.tensor(begin, parameter.nbytes, parameter.dtype)
    return row.as_strided(parameter.shape, strides)

"""Announcements as they travel: short ones in one frame, and what was said before by its number.

A training step asks for the same gradients as the one before. So a rank numbers its requests as it
makes them, all others number what they hear from it in the same way, and from the second time on
only numbers are sent, in ranges: `0-159` for all gradients of a model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence

import torch

from farandole.comm.transports.base import Transport
from farandole.comm.transports.claims import CLAIM_BYTES
from farandole.horovod.engine.requests import Request
from farandole.horovod.engine.table import NOTHING, Announcement

OFFER = "!"
"""Before an announcement whose tensor goes along, to be reduced if all announce the same."""

_LONG = "+"  # an announcement that does not fit in a frame; its length in bytes follows


class Speaker:
    """Writes one rank's announcements. At most `capacity` requests are numbered."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._numbers: dict[Request, int] = {}

    def write(self, said: Announcement) -> str:
        if said.is_empty:
            return ""
        numbers: list[int] = []
        fresh: list[Request] = []
        for request in said.requests:
            number = self._numbers.get(request)
            if number is not None:
                numbers.append(number)
                continue
            fresh.append(request)
            if request.is_lasting and len(self._numbers) < self._capacity:
                self._numbers[request] = len(self._numbers)
        if not fresh and said.is_plain:
            return _ranges(numbers)
        return json.dumps(
            [_ranges(numbers), fresh, *said[1:]],
            separators=(",", ":"),
        )


class Listener:
    """Reads what one rank writes, with the same `capacity`."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._known: list[Request] = []

    def knows(self, number: str, request: Request) -> bool:
        """Whether this rank means that request by this number."""
        index = int(number)
        return index < len(self._known) and self._known[index] == request

    def read(self, text: str) -> Announcement:
        if text.startswith(OFFER):
            text = text[1:]
        if not text:
            return NOTHING
        if not text.startswith("["):
            return Announcement(tuple(map(self._known.__getitem__, _numbers(text))))
        ranges, written, joins, leaves, tuned = json.loads(text)
        before = [self._known[number] for number in _numbers(ranges)]
        fresh = [Request.read(value) for value in written]
        for request in fresh:
            if request.is_lasting and len(self._known) < self._capacity:
                self._known.append(request)
        return Announcement((*before, *fresh), joins, leaves, tuple(tuned))


def exchange(
    transport: Transport, text: str, offer: Callable[[str], list[str]] | None = None
) -> list[str]:
    """Every rank's text, in rank order: one round if all are short, else two.

    With an `offer`, which is called instead of `share`, texts that are all the same offer mean that
    it was taken.
    """
    data = text.encode()
    if offer is not None and len(data) < CLAIM_BYTES:
        claim = f"{OFFER}{text}"
        claims = offer(claim)
        if claims.count(claim) == len(claims):
            return claims
    else:
        claim = text if len(data) <= CLAIM_BYTES else f"{_LONG}{len(data)}"
        claims = transport.share(claim)
    if not any(claim.startswith(_LONG) for claim in claims):
        return claims
    counts = [int(claim[1:]) if claim.startswith(_LONG) else 0 for claim in claims]
    mine = bytearray(data if counts[transport.rank] else b"")
    flat = torch.frombuffer(mine, dtype=torch.uint8) if mine else torch.empty(0, dtype=torch.uint8)
    parts = transport.all_gather(flat, counts).split(counts)
    return [
        part.numpy().tobytes().decode() if count else claim
        for part, count, claim in zip(parts, counts, claims, strict=True)
    ]


def _ranges(numbers: Sequence[int]) -> str:
    """`3-5,9` for [3, 4, 5, 9]. The order is kept: [5, 3, 4] is `5,3-4`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{a}-{b}" if a != b else str(a) for a, b in spans)


def _numbers(ranges: str) -> Iterator[int]:
    for span in ranges.split(",") if ranges else ():
        first, _, last = span.partition("-")
        yield from range(int(first), int(last or first) + 1)

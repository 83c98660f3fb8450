"""A list of rows travels once; after that 16 bytes stand for it.

A worker often pushes and gets the same rows again: those of its share of the data. So both ends
keep the lists they used last, and the sender names a list by its digest if it believes that the
receiver still has it. Should it be wrong, the receiver says so, and the list is sent after all:

    sender                                receiver
    pack(rows)      ── the list ──▶       unpack: keeps it
    pack(rows)      ── its digest ──▶     unpack: knows it
    pack(rows)      ── its digest ──▶     unpack: None, it has made room for others
    pack_again(rows) ── the list ──▶      unpack: keeps it

With one sender and equal limits that does not happen: both forget the same lists.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Generic, TypeVar

import torch

T = TypeVar("T")

DIGEST_BYTES = 16


def digest_of(rows: torch.Tensor) -> bytes:
    """The same for equal lists only. `rows` is int64, on the CPU."""
    return hashlib.blake2b(rows.contiguous().numpy().data, digest_size=DIGEST_BYTES).digest()


class KeySender:
    """The sender's end of one connection."""

    def __init__(self, limit_bytes: int) -> None:
        self._believed: _Recent[None] = _Recent(limit_bytes)
        self.saved_bytes = 0  # by sending digests

    def pack(self, rows: torch.Tensor) -> torch.Tensor | bytes:
        """What to send for `rows`: the list itself, or the digest by which it is known."""
        if not _is_worth_it(rows):
            return rows
        digest = digest_of(rows)
        if self._believed.has(digest):
            self.saved_bytes += rows.nbytes - DIGEST_BYTES
            return digest
        self._believed.keep(digest, None, rows.nbytes)
        return rows

    def pack_again(self, rows: torch.Tensor) -> torch.Tensor:
        """The receiver did not know the digest of `rows`: the list."""
        self._believed.keep(digest_of(rows), None, rows.nbytes)
        return rows

    def forget(self) -> None:
        """Somebody else is at the other end now."""
        self._believed.clear()


class KeyReceiver:
    """The receiver's end of one connection, or of several, which then share its memory."""

    def __init__(self, limit_bytes: int) -> None:
        self._lists: _Recent[torch.Tensor] = _Recent(limit_bytes)

    @property
    def nbytes(self) -> int:
        """Of the lists that it keeps."""
        return self._lists.nbytes

    def unpack(self, packed: torch.Tensor | bytes) -> torch.Tensor | None:
        """The list; None if this is a digest that it does not know. It must not be changed."""
        if isinstance(packed, bytes):
            return self._lists.get(packed)
        if _is_worth_it(packed):
            digest = digest_of(packed)  # not the sender's word: others may use this list too
            # A copy, because what arrives may lie in a buffer that is used again.
            if not self._lists.has(digest):
                self._lists.keep(digest, packed.clone(), packed.nbytes)
        return packed


class _Recent(Generic[T]):
    """What was used last, by digest, up to a number of bytes."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._entries: OrderedDict[bytes, tuple[T, int]] = OrderedDict()
        self.nbytes = 0

    def has(self, digest: bytes) -> bool:
        """If so it counts as used."""
        if digest not in self._entries:
            return False
        self._entries.move_to_end(digest)
        return True

    def get(self, digest: bytes) -> T | None:
        return self._entries[digest][0] if self.has(digest) else None

    def keep(self, digest: bytes, entry: T, nbytes: int) -> None:
        """Forgets others if it must. What is larger than the limit is not kept at all."""
        if self.has(digest) or nbytes > self._limit_bytes:
            return
        self._entries[digest] = (entry, nbytes)
        self.nbytes += nbytes
        while self.nbytes > self._limit_bytes:
            _, (_, freed) = self._entries.popitem(last=False)
            self.nbytes -= freed

    def clear(self) -> None:
        self._entries.clear()
        self.nbytes = 0


def _is_worth_it(rows: torch.Tensor) -> bool:
    return rows.nbytes > DIGEST_BYTES

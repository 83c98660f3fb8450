"""Who may speak to a parameter server: those who hold the job's key, in their own order.

The key is 32 random bytes in a file that only its owner can read. Each connection derives keys of
its own from it (handshake.py), one for each direction, and every message is sealed with them:

    seal     magic, number of the message, count of frames, tag 1 … tag n, tag 0
    frame 0  ┐ tag 0 covers the seal up to there, and frame 0
    frame 1  │ tag 1 covers frame 1
      …      ┘

A tag is AES-256-GMAC, which has hardware in every CPU and here is three times as fast as
HMAC-SHA256. Its nonce is the number of the message and the index of the frame, so a frame that is
altered, repeated, moved, left out or from elsewhere does not fit. What is sent can be read on the
way: the seal says who sent it, it hides nothing.
"""

from __future__ import annotations

import os
import secrets
import stat
import struct
from collections.abc import Sequence
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from farandole.errors import CommError, UserError

KEY_BYTES = 32
MAGIC = b"FdSe"
MAX_FRAME_BYTES = 2**31 - 1  # what one call of OpenSSL takes
_HEAD = struct.Struct("<4sQI")
_NONCE = struct.Struct("<QI")
_TAG_BYTES = 16


class BadSeal(CommError):  # noqa: N818  (not an error here: somebody else's message)
    """Drop the message: "not sealed", or a sealed one that was "replayed"."""


class Gap(BadSeal):
    """Sealed, but messages before it are missing: the two ends must begin anew."""


class Seal:
    """One end of a connection: seals what goes out, checks what comes in."""

    def __init__(self, outgoing: bytes, incoming: bytes) -> None:
        self._outgoing = AESGCM(outgoing)
        self._incoming = AESGCM(incoming)
        self._sent = 0
        self._received = 0

    def sign(self, frames: Sequence[bytes | memoryview]) -> bytes:
        """The frame to send before `frames`. Call it once a message, in the order of sending."""
        number = self._sent
        self._sent += 1  # before anything can fail: with one nonce twice, the key could be computed
        tag = self._outgoing.encrypt
        tags = [tag(_NONCE.pack(number, i), b"", frames[i]) for i in range(1, len(frames))]
        seal = b"".join((_HEAD.pack(MAGIC, number, len(frames)), *tags))
        return seal + tag(_NONCE.pack(number, 0), b"", b"".join((seal, frames[0])))

    def check(self, seal: memoryview, frames: Sequence[bytes | memoryview]) -> None:
        """Whether `seal` is the other end's for `frames`, and they are its next message.

        Raises `BadSeal`, and then the same message is still the next one.
        """
        if not frames or len(seal) != _HEAD.size + _TAG_BYTES * len(frames):
            raise BadSeal("not sealed")
        magic, number, count = _HEAD.unpack_from(seal)
        if magic != MAGIC or count != len(frames):
            raise BadSeal("not sealed")
        # `decrypt` of an empty text compares the tags, in constant time.
        check = self._incoming.decrypt
        try:
            own = b"".join((seal[:-_TAG_BYTES], frames[0]))
            check(_NONCE.pack(number, 0), bytes(seal[-_TAG_BYTES:]), own)
            if number < self._received:
                raise BadSeal("replayed")
            if number > self._received:
                raise Gap("messages are missing")
            for i in range(1, len(frames)):
                begin = _HEAD.size + _TAG_BYTES * (i - 1)
                tag = bytes(seal[begin : begin + _TAG_BYTES])
                check(_NONCE.pack(number, i), tag, frames[i])
        except InvalidTag:
            raise BadSeal("not sealed") from None
        self._received += 1


def make_key(path: Path) -> bytes:
    """Writes a new key, whole or not at all. Raises `UserError`, also if the file exists."""
    key = secrets.token_bytes(KEY_BYTES)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(key)
                file.flush()
                os.fsync(descriptor)
            os.link(draft, path)  # unlike a renaming, this replaces nothing
        finally:
            draft.unlink()
    except FileExistsError:
        raise UserError(
            f"there is a file {path} already. Another job may be using it as its key: "
            "name another one, or delete it if that job has ended."
        ) from None
    except OSError as error:
        raise UserError(
            f"cannot write the job's key {path}: {error.strerror}. "
            "Name a file in a folder that you can write to, on a disk with room."
        ) from None
    return key


def read_key(path: Path) -> bytes:
    """The key that `make_key` wrote. Raises `UserError` if anybody else could know it."""
    remedy = f"It must belong to you, and nobody else may read it: chmod 600 {path}"
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for its other end.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(f"cannot read the job's key {path}: {error.strerror}. {remedy}") from None
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise UserError(f"the job's key {path} is not a file. {remedy}")
        if about.st_uid != os.geteuid():
            raise UserError(
                f"the job's key {path} belongs to user {about.st_uid}, and you are user "
                f"{os.geteuid()}. {remedy}"
            )
        if about.st_mode & 0o077:
            mode = stat.S_IMODE(about.st_mode)
            raise UserError(f"others can use the job's key {path}: mode {mode:03o}. {remedy}")
        key = file.read(KEY_BYTES + 1)
    if len(key) != KEY_BYTES:
        raise UserError(
            f"the job's key {path} has {about.st_size} bytes, not {KEY_BYTES}: it is another file, "
            f"or damaged. Make a new one, with mode 600 (chmod 600 {path})."
        )
    return key

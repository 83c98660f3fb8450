"""Where a job's store is, and how a worker is told: by two variables of its environment.

Those of a process can be read by its own user alone, so the token may be among them. A command
line can be read by everybody, and never has it.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from farandole.environment import STORE, TOKEN, TOKEN_FILE
from farandole.errors import JoinError, UserError
from farandole.worker.store.connection import StoreConnection, connect_to_host, connect_to_path

LOOPBACK = "127.0.0.1"
_TOKEN_BYTES = 32
_FEWEST_CHARACTERS = 32
_LONGEST_FILE = 4096


@dataclass(frozen=True)
class StoreAddress:
    """A Unix socket's path, or a host and a port with the job's token.

    `port` is in any case the one at which the same store answers PyTorch's own clients.
    """

    path: Path | None = None
    host: str = ""
    port: int = 0
    token: bytes = field(default=b"", repr=False)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" if self.path is None else str(self.path)

    def connect(self, seconds: float) -> StoreConnection:
        """Raises `OSError`, and `ProtocolError` for a server that does not hold the token."""
        if self.path is not None:
            return connect_to_path(self.path, seconds)
        return connect_to_host(self.host, self.port, self.token, seconds)

    def variables(self) -> dict[str, str]:
        """What `launcher_store` reads."""
        if self.path is not None:
            return {STORE: f"unix:{self.port}:{self.path}"}
        return {STORE: f"tcp:{self.port}:{self.host}", TOKEN: self.token.decode()}


def launcher_store(environ: Mapping[str, str]) -> StoreAddress | None:
    """The store of this process's launcher; None where it has none of ours. Raises `JoinError`."""
    text = environ.get(STORE)
    if not text:
        return None
    kind, _, rest = text.partition(":")
    port, _, place = rest.partition(":")
    token = environ.get(TOKEN, "").encode()
    if kind not in ("unix", "tcp") or not port.isdigit() or not place:
        raise JoinError(f"the launcher set {STORE}={text!r}, which is no place.")
    if kind == "unix":
        return StoreAddress(Path(place), port=int(port))
    if not token:
        raise JoinError(f"the launcher set {STORE}={text!r}, and no {TOKEN}.")
    return StoreAddress(None, place, int(port), token)


def new_token() -> bytes:
    return secrets.token_hex(_TOKEN_BYTES).encode()


def users_token(environ: Mapping[str, str]) -> bytes | None:
    """The token for ranks that something else started; None where the user has given none.

    Raises `UserError` for one that can be guessed, or a file that others can read.
    """
    text, source = environ.get(TOKEN, ""), TOKEN
    if not text and environ.get(TOKEN_FILE):
        source = f"the file in {TOKEN_FILE}"
        text = _read_private(Path(environ[TOKEN_FILE]))
    if not text:
        return None
    if len(text) < _FEWEST_CHARACTERS:
        raise UserError(
            f"{source} has {len(text)} characters; a token has {_FEWEST_CHARACTERS} or more that "
            f"nobody can guess, the same on all ranks: export {TOKEN}=$(openssl rand -hex 32)"
        )
    return text.encode()


def _read_private(path: Path) -> str:
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for its other end.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
                raise UserError(f"the token {path} is not a file of yours.")
            if about.st_mode & 0o077:
                raise UserError(f"others can use the token {path}: chmod 600 {path}")
            return file.read(_LONGEST_FILE).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the job's token {path}: {error}") from None

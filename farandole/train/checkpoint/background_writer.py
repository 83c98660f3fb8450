"""Writes one rank's part of a checkpoint while training goes on: in a thread of low priority.

A thread is enough: hashing, writing and syncing leave Python's lock to others. Each file is written
and hashed in one pass, in pieces, so that training, which the system prefers, gets the processor
back between any two of them.

Ranks do not talk to each other here, because the training's own collectives are under way. Each
leaves a file in the unfinished checkpoint that says what it has written, or why it could not; rank
0 waits for all of them and commits the checkpoint, or removes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from farandole.serialization import unpack
from farandole.train.checkpoint import checkpoint
from farandole.train.checkpoint.finite_parts import not_finite_names
from farandole.train.checkpoint.manifest import Entry, file_of
from farandole.train.checkpoint.snapshot import PartSnapshot

_PIECE_BYTES = 2**20
_POLL_SECONDS = 0.05
_LOWEST_PRIORITY = 19

Commit = Callable[[Sequence[Entry]], str]
"""On rank 0: gives the checkpoint its name, and returns it."""


class BackgroundWriter:
    """Begins at once. `name` and `problem` are valid when it has ended."""

    def __init__(
        self,
        temporary: Path,
        parts: Mapping[str, PartSnapshot],
        *,
        rank: int,
        size: int,
        timeout_seconds: float,
        commit: Commit,
    ) -> None:
        self.temporary = temporary
        self.name: str | None = None  # of the checkpoint, on rank 0
        self.problem: str | None = None
        self._parts = parts
        self._rank = rank
        self._size = size
        self._timeout_seconds = timeout_seconds
        self._commit = commit
        self._progress = 0
        self._thread = threading.Thread(target=self._work, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> str | None:
        """Waits until it has ended, or makes no progress for the timeout.

        Returns what went wrong.
        """
        seen, since = self._progress, time.monotonic()
        while self._thread.is_alive():
            self._thread.join(_POLL_SECONDS)
            if self._progress != seen:
                seen, since = self._progress, time.monotonic()
            # Rank 0 waits for the others, as long, when it has written its own.
            elif time.monotonic() - since > self._timeout_seconds + 2 * _POLL_SECONDS + 1:
                return f"nothing was written for {self._timeout_seconds:g} s. Is the disk there?"
        return self.problem

    def _work(self) -> None:
        _step_back()
        try:
            entry = self._write()
            self._leave(self._rank, [None, entry])
            if self._rank == 0:
                self.name = self._commit(self._entries())
        except _CommitError as failed:
            self.problem = str(failed)
        except OSError as error:
            self.problem = checkpoint.out_of_room(error)
        except Exception as error:  # whatever it is, the next save and the end of the run tell it
            self.problem = f"{type(error).__name__}: {error}"
        if self.problem is not None:
            self._leave_problem()
            if self._rank == 0:
                checkpoint.discard(self.temporary)
        self._parts = {}  # large: the copy must not live as long as this object

    def _write(self) -> Entry:
        files, trees = {}, {}
        for name, part in self._parts.items():
            trees[name] = part.tree
            if part.data is not None:
                file = self.temporary / file_of(name)
                files[file.name] = self._write_file(file, part)
        copies = {name: unpack(part.tree, part.tensors) for name, part in self._parts.items()}
        not_finite = not_finite_names(copies)
        self._progress += 1
        return {"files": files, "trees": trees, "not_finite": not_finite}

    def _write_file(self, path: Path, part: PartSnapshot) -> dict[str, Any]:
        assert part.data is not None
        digest, size = hashlib.sha256(), 0
        data = part.data.numpy().data
        pieces = (data[at : at + _PIECE_BYTES] for at in range(0, len(data), _PIECE_BYTES))
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)  # as safetensors does
        with os.fdopen(handle, "wb", buffering=0) as file:
            for piece in (memoryview(part.header), *pieces):
                digest.update(piece)
                size += len(piece)
                while piece:
                    piece = piece[file.write(piece) :]
                self._progress += 1
            os.fsync(file.fileno())
        self._progress += 1
        return {"bytes": size, "sha256": digest.hexdigest()}

    # What ranks leave for rank 0

    def _leave(self, rank: int, answer: list[Any]) -> None:
        """Writes this rank's answer for rank 0, which may look at any moment."""
        # A rename is atomic: rank 0 sees the whole answer or none. Without a sync, because only a
        # process of this job reads it, and no checkpoint depends on it after a crash.
        half = self.temporary / f".entry-{rank}.half"
        half.write_text(json.dumps(answer))
        half.replace(self._entry_file(rank))

    def _leave_problem(self) -> None:
        """Tells rank 0 that this rank has failed; by an empty file where the disk is full."""
        try:
            self._leave(self._rank, [self.problem, None])
        except OSError:
            with contextlib.suppress(OSError):  # rank 0 then waits in vain, but not for ever
                self._entry_file(self._rank).touch()

    def _entry_file(self, rank: int) -> Path:
        return self.temporary / f".entry-{rank}.json"

    def _entries(self) -> list[Entry]:
        """Of all ranks; their files are gone then. Raises `_CommitError`, which names a rank."""
        found: dict[int, Entry] = {}
        since = time.monotonic()
        while len(found) < self._size:
            for rank in set(range(self._size)) - found.keys():
                path = self._entry_file(rank)
                if not path.exists():
                    continue
                unreadable = ["it could not even say why: is the disk full?", None]
                problem, entry = json.loads(path.read_text() or json.dumps(unreadable))
                if problem is not None:
                    raise _CommitError(f"rank {rank}: {problem}")
                found[rank], since = entry, time.monotonic()
                self._progress += 1
                path.unlink()
            if time.monotonic() - since > self._timeout_seconds:
                missing = sorted(set(range(self._size)) - found.keys())
                raise _CommitError(
                    f"rank 0 waited {self._timeout_seconds:g} s for rank(s) {missing} to write "
                    "their parts; did they fail, or is the disk slow?"
                )
            if len(found) < self._size:
                time.sleep(_POLL_SECONDS)
        return [found[rank] for rank in range(self._size)]


class _CommitError(Exception):
    """The checkpoint cannot be committed."""


def _step_back() -> None:
    """Training comes first. A priority is a thread's own on Linux; elsewhere it stays as it is."""
    with contextlib.suppress(OSError, AttributeError):
        if os.uname().sysname == "Linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)

"""Writes one rank's part of a checkpoint while training goes on: in a thread of low priority.

A thread is enough: hashing, writing and syncing leave Python's lock to others. Each file is written
and hashed in one pass, in pieces, so that training, which the system prefers, gets the processor
back between any two of them.

Ranks do not talk to each other here, because the training's own collectives are under way. Each
leaves a note in the unfinished checkpoint that says what it has written, or why it could not; rank
0 waits for all of them and commits the checkpoint, or removes it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from farandole.serialization import unpack
from farandole.train.checkpoint import checkpoint
from farandole.train.checkpoint.finite_parts import not_finite_names
from farandole.train.checkpoint.manifest import Entry, file_of
from farandole.train.checkpoint.places.destination import Draft
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
        draft: Draft,
        parts: Mapping[str, PartSnapshot],
        *,
        rank: int,
        size: int,
        timeout_seconds: float,
        commit: Commit,
    ) -> None:
        self.seconds: float | None = None  # that it took; None: it is under way
        self._draft = draft
        self._began = time.monotonic()
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
                waited = f"{self._timeout_seconds:g} s"
                return f"nothing was written for {waited}. Is the disk, or the store, there?"
        return self.problem

    def discard(self) -> None:
        """Removes what was written, on rank 0, when no rank writes any more. Raises nothing."""
        self._draft.discard()

    def _work(self) -> None:
        _step_back()
        try:
            entry = self._write()
            self._draft.leave(self._rank, [None, entry])
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
                self._draft.discard()
        self._parts = {}  # large: the copy must not live as long as this object
        self.seconds = time.monotonic() - self._began

    def _write(self) -> Entry:
        files, trees = {}, {}
        for name, part in self._parts.items():
            trees[name] = part.tree
            if part.data is not None:
                files[file_of(name)] = self._write_file(file_of(name), part)
        copies = {name: unpack(part.tree, part.tensors) for name, part in self._parts.items()}
        not_finite = not_finite_names(copies)
        self._progress += 1
        return {"files": files, "trees": trees, "not_finite": not_finite}

    def _write_file(self, name: str, part: PartSnapshot) -> dict[str, Any]:
        assert part.data is not None
        data = part.data.numpy().data
        pieces = (data[at : at + _PIECE_BYTES] for at in range(0, len(data), _PIECE_BYTES))
        return self._draft.write(name, (part.header, *pieces), self._advance)

    def _advance(self) -> None:
        self._progress += 1

    def _leave_problem(self) -> None:
        """Tells rank 0 that this rank has failed; by an empty note where the disk is full."""
        try:
            self._draft.leave(self._rank, [self.problem, None])
        except Exception:  # rank 0 then waits in vain, but not for ever
            self._draft.mark_failed(self._rank)

    def _entries(self) -> list[Entry]:
        """Of all ranks; their files are gone then. Raises `_CommitError`, which names a rank."""
        found: dict[int, Entry] = {}
        since = time.monotonic()
        while len(found) < self._size:
            for rank in set(range(self._size)) - found.keys():
                answer = self._draft.take_answer(rank)
                if answer is None:
                    continue
                problem, entry = answer
                if problem is not None:
                    raise _CommitError(f"rank {rank}: {problem}")
                found[rank], since = entry, time.monotonic()
                self._progress += 1
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

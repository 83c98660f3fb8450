"""Where checkpoints go: what a save needs to know of a folder, or of an object store.

    rank 0    take ── next_name ── begin ─┐                        ┌─ commit, or discard
    all                                   └─ draft.write … leave ──┘

A checkpoint under way is a `Draft`. Nobody takes it for a checkpoint before rank 0 has committed
it, with a manifest that names every file, its size and its checksum.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farandole.errors import CheckpointError
from farandole.train.checkpoint.manifest import Entry

Pieces = Iterable[bytes | memoryview]
Answer = list[Any]
"""What one rank tells rank 0: what went wrong or None, and its entry for the manifest."""


@dataclass(frozen=True)
class Keeping:
    """Which checkpoints stay: the newest, and the best by a metric."""

    newest: int
    metric: str | None = None
    lower_is_better: bool = False


class Draft(ABC):
    """A checkpoint under way. Every rank has one; all of them are the same checkpoint.

    What goes wrong is an `OSError`, or an error of the store's own.
    """

    @abstractmethod
    def write(self, name: str, pieces: Pieces, on_piece: Callable[[], None]) -> dict[str, Any]:
        """Writes one file whole; returns its bytes and its checksum, as a manifest has them."""

    @abstractmethod
    def discard(self) -> None:
        """Removes it, as far as that is possible. For rank 0. Raises nothing."""

    # What ranks leave for rank 0

    def leave(self, rank: int, answer: Answer) -> None:
        """Leaves this rank's answer. Rank 0 may look at any moment, and sees all of it or none."""
        self.put_note(f"entry-{rank}", json.dumps(answer))

    def take_answer(self, rank: int) -> Answer | None:
        """What that rank has left; None: nothing yet. An answer can be taken once."""
        text = self.take_note(f"entry-{rank}")
        if text is None:
            return None
        answer: Answer = json.loads(text) if text else ["it could not say why: is the disk full?"]
        return [*answer, None][:2]

    def mark_failed(self, rank: int) -> None:
        """Where not even an answer can be left. Raises nothing."""
        self.put_mark(f"entry-{rank}")

    @abstractmethod
    def put_note(self, name: str, text: str) -> None: ...

    @abstractmethod
    def take_note(self, name: str) -> str | None: ...

    @abstractmethod
    def put_mark(self, name: str) -> None:
        """A note without text, where there is no room for one. Raises nothing."""


class Destination(ABC):
    """A place for the checkpoints of a run."""

    is_remote: bool = False
    """Parts are uploaded, and not written to a folder that all ranks see."""

    @abstractmethod
    def path_of(self, name: str) -> Path | str:
        """Of a checkpoint, for users."""

    @abstractmethod
    def take(self) -> None:
        """On rank 0, before a save. Raises `CheckpointError` if another job saves there."""

    def succeed(self) -> None:  # noqa: B027
        """In a worker that has become rank 0: what another one has saved there is this run's."""

    @abstractmethod
    def next_name(self) -> str:
        """On rank 0: what the next checkpoint is called, unless another job is quicker."""

    @abstractmethod
    def begin(self, name: str) -> str:
        """On rank 0: makes room for a draft, and returns what the draft is called."""

    @abstractmethod
    def draft(self, called: str) -> Draft:
        """On every rank."""

    @abstractmethod
    def commit(
        self, called: str, name: str, entries: Sequence[Entry], metrics: Mapping[str, float]
    ) -> str:
        """On rank 0: makes the draft a checkpoint, and returns its name. All ranks have written.

        Then, and not before, checkpoints that need not be kept are removed.
        """

    @abstractmethod
    def last_good(self) -> Path | str | None:
        """On rank 0: the newest checkpoint that is whole."""

    def not_saved(self, name: str, reason: str, *, tells_last: bool = True) -> CheckpointError:
        """The error for a save that has failed; names the last good checkpoint, if it may look."""
        last = self.last_good() if tells_last else None
        return CheckpointError(
            f"could not save to {self.path_of(name)}: {reason}"
            + (f" The last good checkpoint is {last}." if last else "")
        )

"""Saves in the background: at most one is under way, and nothing that goes wrong in it is lost.

The main thread agrees on a name with the other ranks and copies the state; then it trains on, while
another thread writes the copy and commits the checkpoint. The next save, or the end of the run,
waits for that thread and tells what went wrong in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farandole.comm import Group
from farandole.errors import CheckpointError
from farandole.train.checkpoint.background_writer import BackgroundWriter, Commit
from farandole.train.checkpoint.places.destination import Destination, Draft
from farandole.train.checkpoint.snapshot import PartSnapshot, Snapshots


class BackgroundSaves:
    """One rank's, of one run."""

    def __init__(self) -> None:
        self._snapshots = Snapshots()
        self._target: _Target | None = None  # of the save that is under way
        self._write_seconds = 0.0
        self._writer: BackgroundWriter | None = None

    def take(self, parts: Mapping[str, Any]) -> dict[str, PartSnapshot]:
        """A copy to write. No save may be under way: the copy reuses the memory of the last one."""
        assert self._writer is None
        return self._snapshots.take(parts)

    def begin(
        self,
        group: Group,
        destination: Destination,
        name: str,
        draft: Draft,
        parts: Mapping[str, PartSnapshot],
        commit: Commit,
    ) -> None:
        """Writes `parts` to the draft; rank 0 then calls `commit`, in the same thread."""
        self._target = _Target(destination, name)
        self._writer = BackgroundWriter(
            draft,
            parts,
            rank=group.rank,
            size=group.size,
            timeout_seconds=group.timeout.total_seconds(),
            commit=commit,
        )

    @property
    def write_seconds(self) -> float | None:
        """How long the last save has taken, 0 before the first; None: it is under way."""
        if self._writer is not None and self._writer.seconds is None:
            return None
        return self._write_seconds if self._writer is None else self._writer.seconds

    def finish_together(self, group: Group) -> Path | str | None:
        """*Together.* Waits for the save that is under way; returns what it made, if there was one.

        Raises `CheckpointError` on every rank when any rank could not write.
        """
        writer, target = self._writer, self._target
        # None under way: then on no rank, except that a worker which has come late has no part in
        # what the others are saving. It must take part in their collective all the same.
        if writer is None and not group.transport.may_join_late:
            return None
        problem = None if writer is None else writer.wait()
        name = None if writer is None else writer.name
        if writer is not None:
            self._forget(writer)
        answers = group.gather_json([problem, name])
        if writer is not None and group.rank == 0 and any(failed for failed, _ in answers):
            # Once more: others may still have been writing when rank 0 failed and removed it.
            writer.discard()
        for rank, (failed, _) in enumerate(answers):
            if failed is not None and target is None:
                raise CheckpointError(f"rank {rank}: {failed} (It was saved in the background.)")
            if failed is not None and target is not None:
                raise target.not_saved(failed, rank, tells_last=group.rank == 0)
        made = answers[0][1]
        return None if made is None or target is None else target.destination.path_of(made)

    def finish_alone(self) -> None:
        """At the end of the run, when nobody can be asked. Rank 0 knows how it went for all.

        Raises `CheckpointError` when this rank could not write, or rank 0 not commit.
        """
        writer, target = self._writer, self._target
        if writer is None or target is None:
            return
        problem = writer.wait()
        self._forget(writer)
        if problem is not None:
            raise target.not_saved(problem)

    def _forget(self, writer: BackgroundWriter) -> None:
        self._write_seconds = writer.seconds or 0.0
        self._writer = None


@dataclass(frozen=True)
class _Target:
    """Of one save."""

    destination: Destination
    name: str

    def not_saved(
        self, problem: str, rank: int | None = None, *, tells_last: bool = True
    ) -> CheckpointError:
        who = "" if rank is None or problem.startswith("rank ") else f"rank {rank}: "
        reason = f"{who}{problem} (It was saved in the background.)"
        return self.destination.not_saved(self.name, reason, tells_last=tells_last)

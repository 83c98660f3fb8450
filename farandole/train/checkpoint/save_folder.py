"""The folders that a run saves to: its lock on each, and which checkpoints there are its own.

A run removes only checkpoints that it has made or gone on from. Whatever else appears in the folder
is another job's. Only rank 0, which numbers and removes checkpoints, has use for this.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path

from farandole.errors import CheckpointError
from farandole.train.checkpoint import checkpoint
from farandole.train.checkpoint.folder_lock import FolderLock, lock

_POLL_SECONDS = 0.1


@dataclass
class SaveFolder:
    """One of them."""

    lock: FolderLock | None = None
    own: set[str] = field(default_factory=set)  # names of checkpoints
    used: bool = False  # this run has saved or loaded here
    made_here: bool = False  # there was no such folder before


class SaveFolders:
    """All of one run."""

    def __init__(self) -> None:
        self._folders: dict[Path, SaveFolder] = {}
        self.notes: list[str] = []  # to tell the user
        self.patience_seconds = 0.0  # with another process that has a folder, and may be ending

    def lock(self, path: Path) -> None:
        """Makes and locks the folder `path`, unless this run has it.

        Removes what jobs that died have left half-written there.

        Raises `CheckpointError` when another job saves there, or `OSError`.
        """
        made = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
        folder = self._find(path)
        folder.made_here = folder.made_here or made
        if folder.lock is None or not folder.lock.is_valid():
            if folder.lock is not None:
                folder.lock.release()
            folder.lock = self._locked(path)
            # Only under a lock that no other run of this process had before: else what is
            # half-written may be that run's save in the background.
            if folder.lock.first:
                checkpoint.remove_half_written(path)
            if folder.lock.missing is not None:
                self.notes.append(
                    f"{path} cannot be locked ({folder.lock.missing}): a second job that saves "
                    "there is not noticed. Give every job a folder of its own."
                )

    def own_names(self, path: Path) -> set[str]:
        """Of the checkpoints in `path` that are this run's."""
        return self._find(path).own

    def made(self, target: Path) -> None:
        """This run has made the checkpoint `target`."""
        folder = self._find(target.parent)
        if not folder.used and checkpoint.has_others(target):
            self.notes.append(
                f"{target.parent} holds checkpoints of an earlier run, which this run did not "
                "load; they stay. Call run.load() to go on from them, or choose another name."
            )
        folder.used = True
        folder.own.add(target.name)

    def went_on_from(self, source: Path) -> None:
        """This run goes on from the checkpoint `source`: it and the older ones are its own now.

        Newer ones were passed over, because they are damaged, or because an older one was asked
        for. They are not this run's past, and not for it to remove.
        """
        folder = self._find(source.parent)
        folder.used = True
        folder.own.update(checkpoint.names_up_to(source))

    def take_over(self, path: Path) -> None:
        """Another worker was rank 0 of this run before: what it has saved is this run's own."""
        folder, last = self._find(path), checkpoint.newest(path)
        if not folder.used and last is not None:
            self.went_on_from(last)

    def release(self) -> None:
        """Other jobs may save there now."""
        for path, folder in self._folders.items():
            if folder.lock is not None:
                folder.lock.release()
                folder.lock = None
            if folder.made_here and not folder.used:
                with contextlib.suppress(OSError):  # another job has come
                    path.rmdir()

    def _find(self, path: Path) -> SaveFolder:
        return self._folders.setdefault(path.resolve(), SaveFolder())

    def _locked(self, path: Path) -> FolderLock:
        deadline = time.monotonic() + self.patience_seconds
        while True:
            try:
                return _locked(path)
            except CheckpointError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_POLL_SECONDS)


def _locked(path: Path) -> FolderLock:
    """Another job may just have removed the folder, because it had saved nothing there."""
    try:
        return lock(path)
    except FileNotFoundError:
        path.mkdir(parents=True, exist_ok=True)
        return lock(path)

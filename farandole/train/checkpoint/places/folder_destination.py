"""Checkpoints in a folder that all ranks see: a draft is a folder too, and a rename commits it."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from farandole.train.checkpoint import checkpoint
from farandole.train.checkpoint.manifest import Entry
from farandole.train.checkpoint.places.destination import Destination, Draft, Keeping, Pieces
from farandole.train.checkpoint.save_folder import SaveFolders


class FolderDestination(Destination):
    def __init__(self, folder: Path, folders: SaveFolders, keeping: Keeping) -> None:
        self.folder = folder
        self._folders = folders
        self._keeping = keeping

    def path_of(self, name: str) -> Path:
        return self.folder / name

    def take(self) -> None:
        self._folders.lock(self.folder)

    def succeed(self) -> None:
        self._folders.take_over(self.folder)

    def next_name(self) -> str:
        return checkpoint.next_name(self.folder)

    def begin(self, name: str) -> str:
        return checkpoint.begin(self.folder / name).name

    def draft(self, called: str) -> FolderDraft:
        return FolderDraft(self.folder / called)

    def commit(
        self, called: str, name: str, entries: Sequence[Entry], metrics: Mapping[str, float]
    ) -> str:
        named = checkpoint.commit(self.folder / called, self.folder / name, entries, metrics)
        self._folders.made(named)
        own = self._folders.own_names(self.folder)
        best = None
        if self._keeping.metric is not None:
            best = checkpoint.best(
                self.folder, own, self._keeping.metric, lower=self._keeping.lower_is_better
            )
        checkpoint.prune(self.folder, self._keeping.newest, own, best)
        return named.name

    def last_good(self) -> Path | None:
        return checkpoint.newest_good(self.folder)


class FolderDraft(Draft):
    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, name: str, pieces: Pieces, on_piece: Callable[[], None]) -> dict[str, Any]:
        digest, size = hashlib.sha256(), 0
        # As safetensors does: for its owner alone.
        handle = os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb", buffering=0) as file:
            for piece in pieces:
                digest.update(piece)
                size += len(piece)
                rest = memoryview(piece)
                while rest:
                    rest = rest[file.write(rest) :]
                on_piece()
            os.fsync(file.fileno())
        on_piece()
        return {"bytes": size, "sha256": digest.hexdigest()}

    def discard(self) -> None:
        checkpoint.discard(self.path)

    def put_note(self, name: str, text: str) -> None:
        # A rename is atomic. Without a sync, because only a process of this job reads it, and no
        # checkpoint depends on it after a crash.
        half = self.path / f".{name}.half"
        half.write_text(text)
        half.replace(self._note(name))

    def take_note(self, name: str) -> str | None:
        try:
            text = self._note(name).read_text()
        except FileNotFoundError:
            return None
        self._note(name).unlink()
        return text

    def put_mark(self, name: str) -> None:
        with contextlib.suppress(OSError):
            self._note(name).touch()

    def _note(self, name: str) -> Path:
        return self.path / f".{name}.json"

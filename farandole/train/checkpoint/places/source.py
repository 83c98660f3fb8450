"""Where checkpoints come from: what a load needs to know of a folder, or of an object store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from farandole.comm import Group
from farandole.train.checkpoint import checkpoint


class Source(ABC):
    """One checkpoint that was asked for, or a place that holds many."""

    @abstractmethod
    def candidates(self) -> tuple[bool, list[str]]:
        """On rank 0: whether one was asked for by its own path; and what there is, newest first."""

    @abstractmethod
    def label(self, candidate: str) -> Path | str:
        """What users call it."""

    @abstractmethod
    def folder(self, group: Group, candidate: str) -> AbstractContextManager[Path]:
        """*Together.* The folder in which its files are, within the context.

        Raises `CheckpointError` on every rank when one cannot get them.
        """


class FolderSource(Source):
    """A path that all ranks see."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def candidates(self) -> tuple[bool, list[str]]:
        if checkpoint.is_checkpoint(self._path):
            return True, [str(self._path)]
        found = reversed(checkpoint.names(self._path))
        return False, [str(self._path / name) for name in found]

    def label(self, candidate: str) -> Path:
        return Path(candidate)

    def folder(self, group: Group, candidate: str) -> AbstractContextManager[Path]:
        return nullcontext(Path(candidate))

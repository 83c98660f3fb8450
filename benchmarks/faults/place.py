"""Where one drill runs: the folder in which its command is typed, and what it has written."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence

import psutil

from faults.slot import Process, Slot


class Place:
    """Made for one drill and removed after it. `temporary` is an odd folder to use as TMPDIR."""

    def __init__(self, slot: Slot, folder: str = "job", temporary: str | None = None) -> None:
        self._slot = slot
        self.root = slot.root / "drill"
        self.root.mkdir()
        self.folder = self.root / folder
        self.folder.mkdir()
        self.temporary = self.root / temporary if temporary else slot.temporary
        self.temporary.mkdir(parents=True, exist_ok=True)
        self.shared = slot.shared
        self.started: list[Process] = []

    def start(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        output: str = "output",
        *,
        warm: bool = True,
    ) -> Process:
        """The first one is the drill's job. `warm`: forked, if its variables allow it."""
        odd = {"TMPDIR": str(self.temporary)} if self.temporary != self._slot.temporary else {}
        told, sink = {**variables, **odd}, self.root / output
        job = self._slot.start(command, told, self.folder, sink, warm=warm)
        self.started.append(job)
        return job

    def said(self, output: str = "output") -> str:
        """What the job has written so far."""
        path = self.root / output
        return path.read_text(errors="replace") if path.exists() else ""

    def processes(self) -> list[psutil.Process]:
        """All of the drill that still run."""
        return self._slot.processes()

    def close(self) -> None:
        """Ends what is left, and removes the folders."""
        self._slot.tidy()
        shutil.rmtree(self.root, ignore_errors=True)

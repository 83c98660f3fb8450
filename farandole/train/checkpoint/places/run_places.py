"""The places that a run saves to and loads from: folders, and folders in object stores."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from farandole.errors import UserError
from farandole.train.checkpoint import checkpoint
from farandole.train.checkpoint.automatic.policy import Checkpoints
from farandole.train.checkpoint.places.destination import Destination, Keeping
from farandole.train.checkpoint.places.folder_destination import FolderDestination
from farandole.train.checkpoint.places.source import FolderSource, Source
from farandole.train.checkpoint.save_folder import SaveFolders
from farandole.urls import is_url

if TYPE_CHECKING:
    from farandole.train.checkpoint.remote.remote_destination import RemoteFolder


class Places:
    """Of one run. A place that is None is the run's own, by its policy."""

    def __init__(self, run_folder: Path, policy: Checkpoints) -> None:
        self._run_folder = run_folder
        self._policy = policy
        self._folders = SaveFolders()
        self._remote: dict[str, RemoteFolder] = {}  # by URL
        if is_url(policy.to):
            self._store(str(policy.to))  # raises at once if it cannot be reached

    @property
    def notes(self) -> list[str]:
        """To tell the user."""
        return self._folders.notes

    @property
    def may_be_written(self) -> bool:
        """A folder that cannot be written to can still be loaded from."""
        own = self._own(None)
        return is_url(own) or not Path(own).exists() or os.access(own, os.W_OK)

    @property
    def own_folder(self) -> Path | None:
        """The run's own place; None: it is in an object store."""
        own = self._own(None)
        return None if is_url(own) else Path(own)

    def destination(self, place: str | Path | None, keep: int | None = None) -> Destination:
        policy, where = self._policy, self._own(place)
        keep = policy.keep if keep is None else keep
        if keep < 1:
            raise UserError(f"keep={keep}: at least the new checkpoint must stay.")
        keeping = Keeping(keep, policy.metric, policy.lower_is_better)
        if not is_url(where):
            return FolderDestination(Path(where), self._folders, keeping)
        # Imported here: most runs save to folders.
        from farandole.train.checkpoint.remote.remote_destination import RemoteDestination

        return RemoteDestination(self._store(str(where)), keeping)

    def source(self, place: str | Path | None) -> Source:
        where = self._own(place)
        if not is_url(where):
            return FolderSource(Path(where))
        from farandole.train.checkpoint.remote.remote_source import RemoteSource

        folder, name = self._split(str(where))
        return RemoteSource(folder.store, name, self._run_folder)

    def went_on_from(self, place: str | Path | None, name: str) -> None:
        """On rank 0: the run goes on from this candidate of that place's source."""
        where = self._own(place)
        if is_url(where):
            self._split(str(where))[0].went_on_from(name)
        else:
            self._folders.went_on_from(Path(name))

    def newest(self, place: str | Path | None) -> Path | str | None:
        """Without asking a store: the process may be about to end."""
        where = self._own(place)
        if not is_url(where):
            return checkpoint.newest(Path(where))
        folder = self._store(str(where))
        return None if folder.last is None else folder.store.url_of(folder.last)

    def wait_for_locks(self, seconds: float) -> None:
        """From now on another process that has a folder is given so much time to end."""
        self._folders.patience_seconds = seconds

    def release(self) -> None:
        """Other jobs may save there now."""
        self._folders.release()

    def _own(self, place: str | Path | None) -> str | Path:
        if place:
            return place
        return self._policy.to or self._run_folder / "checkpoints"

    def _store(self, url: str) -> RemoteFolder:
        from farandole.train.checkpoint.remote.remote_destination import RemoteFolder
        from farandole.train.checkpoint.remote.store import ObjectStore

        url = url.rstrip("/")
        if url not in self._remote:
            self._remote[url] = RemoteFolder(ObjectStore(url))
        return self._remote[url]

    def _split(self, url: str) -> tuple[RemoteFolder, str | None]:
        """A URL names a folder of checkpoints, or one in such a folder."""
        from farandole.train.checkpoint.remote.store import RemoteName

        parent, _, last = url.rstrip("/").rpartition("/")
        if RemoteName.parse(last) is None:
            return self._store(url), None
        return self._store(parent), last

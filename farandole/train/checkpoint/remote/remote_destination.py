"""Saves to an object store: every rank uploads its own parts, and rank 0's manifest ends the save.

Ranks tell rank 0 what they have written by small objects beside it, as they do by files in a
folder; hosts need no disk in common.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from farandole.errors import CheckpointError
from farandole.train.checkpoint.manifest import NAME as MANIFEST
from farandole.train.checkpoint.manifest import Entry, Manifest, manifest_text
from farandole.train.checkpoint.places.destination import Destination, Draft, Keeping, Pieces
from farandole.train.checkpoint.remote.store import ObjectStore, RemoteName, require_files


class RemoteFolder:
    """What a run knows of its folder in a store, from one save to the next. On rank 0."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.own: set[str] = set()  # checkpoints that this run has made or gone on from
        self.last: str | None = None  # the newest of them
        self.first: RemoteName | None = None  # that this run has made
        self._known: set[str] | None = None  # there before this run; None: it has not looked yet

    def take(self) -> list[RemoteName]:
        """Looks for checkpoints of others; returns all that are whole.

        Raises `CheckpointError` when a run that was here before this one saves here too. (Where two
        have begun at once, the one whose first checkpoint comes later by name gives way.)
        """
        whole = self.store.whole_names()
        if self._known is None:
            self._known = {name.text for name in whole}
        new = [name for name in whole if name.text not in self._known | self.own]
        for name in new:
            earliest = min(other for other in whole if other.run == name.run)
            if self.first is None or earliest < self.first:
                raise CheckpointError(
                    f"another run saves into {self.store.url}: it has made {name.text} (the name "
                    "has its host and process), and one run at a time may. End it, or give this "
                    "one a place of its own."
                )
        return whole

    def went_on_from(self, name: str) -> None:
        """That one and the older ones are this run's own now."""
        source = RemoteName.parse(name)
        assert source is not None
        whole = [other for other in self.store.whole_names() if other <= source]
        self.own.update(other.text for other in whole)
        self.last = name


class RemoteDestination(Destination):
    is_remote = True

    def __init__(self, folder: RemoteFolder, keeping: Keeping) -> None:
        self._folder = folder
        self._store = folder.store
        self._keeping = keeping

    def path_of(self, name: str) -> str:
        return self._store.url_of(name)

    def take(self) -> None:
        self._folder.take()

    def next_name(self) -> str:
        names = self._store.names()  # also those under way
        return self._store.new_name(names[-1].number + 1 if names else 0).text

    def begin(self, name: str) -> str:
        return name

    def draft(self, called: str) -> RemoteDraft:
        return RemoteDraft(self._store, called)

    def commit(
        self, called: str, name: str, entries: Sequence[Entry], metrics: Mapping[str, float]
    ) -> str:
        # What has arrived is looked at once more: an upload may be cut short without an error.
        expected = {
            file: item["bytes"] for entry in entries for file, item in entry["files"].items()
        }
        require_files(self._store.sizes(called), expected)
        self._folder.take()  # another run may have come during the upload
        self._store.write_small(called, MANIFEST, manifest_text(entries, metrics))
        made = RemoteName.parse(called)
        assert made is not None
        folder = self._folder
        folder.first = folder.first or made
        folder.own.add(called)
        folder.last = called
        self._prune(made)
        return called

    def last_good(self) -> str | None:
        last = self._folder.last
        return None if last is None else self.path_of(last)

    def _prune(self, made: RemoteName) -> None:
        """Removes what need not be kept, and drafts that were overtaken. An error can wait."""
        with contextlib.suppress(Exception):
            names = self._store.names()
            mine = [name for name in names if name.text in self._folder.own]
            manifests = dict(self._manifests(mine))
            finite = [
                name
                for name in mine
                if name.text in manifests and not manifests[name.text].not_finite
            ]
            stay = {*mine[-self._keeping.newest :], *finite[-1:], *self._best(finite, manifests)}
            for name in mine:
                if name not in stay:
                    self._store.remove(name.text)
                    self._folder.own.discard(name.text)
            for name in names:
                if name.number < made.number and not self._store.is_whole(name.text):
                    self._store.remove(name.text)

    def _manifests(self, names: Sequence[RemoteName]) -> Iterator[tuple[str, Manifest]]:
        """Of those that have one that can be read."""
        for name in names:
            with contextlib.suppress(ValueError, LookupError, TypeError):
                yield name.text, self._store.manifest(name.text)

    def _best(
        self, finite: Sequence[RemoteName], manifests: Mapping[str, Manifest]
    ) -> list[RemoteName]:
        metric = self._keeping.metric
        values = {
            name: manifests[name.text].metrics[metric]
            for name in finite
            if metric is not None and metric in manifests[name.text].metrics
        }
        choose = min if self._keeping.lower_is_better else max
        return [choose(values, key=values.__getitem__)] if values else []


class RemoteDraft(Draft):
    def __init__(self, store: ObjectStore, name: str) -> None:
        self._store = store
        self._name = name

    def write(self, name: str, pieces: Pieces, on_piece: Callable[[], None]) -> dict[str, Any]:
        digest, size = hashlib.sha256(), 0

        def counted() -> Iterator[bytes | memoryview]:
            nonlocal size
            for piece in pieces:
                digest.update(piece)
                size += len(piece)
                yield piece
                on_piece()

        self._store.write(self._name, name, counted())
        on_piece()
        return {"bytes": size, "sha256": digest.hexdigest()}

    def discard(self) -> None:
        with contextlib.suppress(Exception):  # the next save, or the next run, removes it
            self._store.remove(self._name)

    def put_note(self, name: str, text: str) -> None:
        self._store.write_small(self._name, f"{name}.json", text.encode())

    def take_note(self, name: str) -> str | None:
        content = self._store.read_small(self._name, f"{name}.json")
        if content is None:
            return None
        self._store.remove_file(self._name, f"{name}.json")
        return content.decode()

    def put_mark(self, name: str) -> None:
        with contextlib.suppress(Exception):
            self._store.write_small(self._name, f"{name}.json", b"")

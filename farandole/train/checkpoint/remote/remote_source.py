"""Loads from an object store: one rank of each host fetches the files, and all of them read those.

What is fetched is then read like any other checkpoint, with the same checks of sizes, checksums and
contents. The copy is removed when all ranks have read it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from farandole.comm import Group
from farandole.errors import CheckpointError
from farandole.train.checkpoint.manifest import NAME as MANIFEST
from farandole.train.checkpoint.manifest import file_of, parse_manifest
from farandole.train.checkpoint.places.source import Source
from farandole.train.checkpoint.remote.store import ObjectStore, RemoteName, require_files


class RemoteSource(Source):
    """`name`: of one checkpoint in the store; none: all of them. Copies go to `space`."""

    def __init__(self, store: ObjectStore, name: str | None, space: Path) -> None:
        self._store = store
        self._name = name
        self._space = space

    def __str__(self) -> str:
        return self._store.url

    def candidates(self) -> tuple[bool, list[str]]:
        if self._name is not None:
            return True, [self._name]
        return False, [name.text for name in reversed(self._store.whole_names())]

    def label(self, candidate: str) -> str:
        return self._store.url_of(candidate)

    def folder(self, group: Group, candidate: str) -> AbstractContextManager[Path]:
        return self._fetched(group, candidate)

    @contextmanager
    def _fetched(self, group: Group, candidate: str) -> Iterator[Path]:
        topology = group.topology
        fetches = topology.local_rank(group.rank) == 0
        copy: Path | None = None
        problem: str | None = None
        try:
            if fetches:
                try:
                    copy = self._fetch(candidate, topology.host(group.rank).ranks)
                except Exception as error:  # of a disk, a network, a store's own package
                    problem = f"{type(error).__name__}: {error}"
            host = topology.host_index(group.rank)
            answers = group.gather_json([problem, host, str(copy or "")])
            for rank, (failed, _, _) in enumerate(answers):
                if failed is not None:
                    raise CheckpointError(
                        f"checkpoint {self.label(candidate)} could not be fetched: rank {rank}: "
                        f"{failed}"
                    )
            yield next(Path(path) for _, where, path in answers if where == host and path)
            group.barrier()  # whoever is slow still reads it
        finally:
            if copy is not None:
                shutil.rmtree(copy.parent, ignore_errors=True)

    def _fetch(self, name: str, ranks: Sequence[int]) -> Path:
        """Copies what these ranks need to a new folder. Raises `ValueError` for no checkpoint."""
        text = self._store.manifest_text(name)
        manifest = parse_manifest(text)
        expected = {file_of(part): stored.bytes for part, stored in manifest.files.items()}
        # Before anything is fetched: what is too large would fill the disk.
        require_files(self._store.sizes(name), expected)
        self._space.mkdir(parents=True, exist_ok=True)
        copy = Path(tempfile.mkdtemp(prefix=".fetched-", dir=self._space)) / _plain(name)
        try:
            copy.mkdir()
            others = {file_of(part) for part in manifest.files if part.startswith("rank-")}
            others -= {file_of(f"rank-{rank}") for rank in ranks}
            for file in expected.keys() - others:
                self._store.fetch(name, file, str(copy / file))
            (copy / MANIFEST).write_bytes(text)
        except BaseException:
            shutil.rmtree(copy.parent, ignore_errors=True)
            raise
        return copy


def _plain(name: str) -> str:
    parsed = RemoteName.parse(name)
    return f"{parsed.number:06d}" if parsed is not None else "000000"

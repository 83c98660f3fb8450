"""Makes a checkpoint of what the survivors of the last attempt have left (see `leaving`).

On rank 0 of the next attempt, under the lock on the folder, before it looks for the checkpoint to
go on from. Files are linked, not read: their checksums are in the survivors' manifests, and are
checked when the checkpoint is loaded.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from farandole.errors import CheckpointError
from farandole.train.checkpoint import checkpoint
from farandole.train.checkpoint.manifest import Entry, Manifest, file_of, read_manifest
from farandole.train.checkpoint.places.destination import Destination
from farandole.train.checkpoint.places.folder_destination import FolderDestination
from farandole.train.checkpoint.survivors.leaving import FOLDER, PLACE
from farandole.train.randomness import random_state_from
from farandole.train.session import Session

_DAMAGE = (OSError, ValueError, LookupError, TypeError, CheckpointError)
NewRandom = Callable[[int, int], dict[str, Any]]
"""A random state that no other rank has had: by rank, and the number of steps."""


@dataclass(frozen=True)
class _Left:
    """By one rank, after some number of steps."""

    rank: int
    folder: Path
    manifest: Manifest
    place: int  # in its replica
    places: int  # of a replica
    run: Mapping[str, Any]


def join_together(session: Session, destination: Destination, attempt: int) -> None:
    """*Together.* What ranks of the attempt before have left becomes the newest checkpoint.

    What cannot be used is said, and is no error: there is the last checkpoint.
    """
    if session.rank == 0:
        assert isinstance(destination, FolderDestination)

        def new_random(rank: int, steps: int) -> dict[str, Any]:
            seeds = np.random.SeedSequence([session.seed, rank, steps])
            return random_state_from(int(seeds.generate_state(1)[0]), session.device)

        try:
            made = join_survivors(destination, attempt, new_random)
        except _DAMAGE as error:
            warnings.warn(
                f"what the survivors of a lost worker have left cannot be used: {error}",
                stacklevel=4,
            )
        else:
            if made is not None:
                session.print(f"made {made} of what the survivors of a lost worker have left")
            elif attempt > 0:
                session.print(
                    "the survivors have left no whole model that is newer than the last checkpoint"
                )
    session.group.barrier()  # the others must not look for checkpoints before


def join_survivors(
    destination: FolderDestination, attempt: int, new_random: NewRandom
) -> Path | None:
    """The checkpoint made of what the attempt before this one has left; None: there is none.

    Lost ranks get the strategy's state of a survivor in the same place, and a new random state.
    Whatever was left is gone afterwards.
    """
    root = destination.folder / FOLDER
    if not root.is_dir():
        return None
    made = None
    if attempt > 0:
        found = list(_read(root / str(attempt - 1)))
        chosen = _latest_whole(found, _steps_of_newest(destination.folder))
        if chosen:
            made = _make(destination, chosen, new_random)
    shutil.rmtree(root, ignore_errors=True)
    return made


def _read(folder: Path) -> Iterator[_Left]:
    """What is damaged, or half-written, is passed over."""
    for path in sorted(folder.glob("[0-9]*/[0-9]*")):
        try:
            parts = checkpoint.read(path, lambda name: name in ("run", PLACE))
            manifest = read_manifest(path)
            place = parts[PLACE]
            left = _Left(
                int(path.parent.name), path, manifest, place["place"], place["places"], parts["run"]
            )
        except _DAMAGE:
            continue
        if not manifest.not_finite and left.run["steps"] == int(path.name):
            yield left


def _latest_whole(found: list[_Left], newer_than: int) -> list[_Left]:
    """All that was left after the highest number of steps for which no place is missing."""
    for steps in sorted({left.run["steps"] for left in found}, reverse=True):
        chosen = [left for left in found if left.run["steps"] == steps]
        if steps > newer_than and {left.place for left in chosen} == set(range(chosen[0].places)):
            return chosen
    return []


def _steps_of_newest(folder: Path) -> int:
    """-1 where there is none that can be read."""
    newest = checkpoint.newest_good(folder)
    if newest is None:
        return -1
    try:
        return int(checkpoint.read(newest, lambda name: name == "run")["run"]["steps"])
    except _DAMAGE:
        return -1


def _make(destination: FolderDestination, chosen: list[_Left], new_random: NewRandom) -> Path:
    first = {left.place: left for left in reversed(chosen)}  # of each place, the lowest rank
    name = destination.next_name()
    called = destination.begin(name)
    draft = destination.draft(called)
    try:
        entries = []
        for left in chosen:
            wanted = {f"rank-{left.rank}"}
            if first[left.place] is left:
                wanted |= {part for part in left.manifest.trees if part.startswith(("mod", "opt"))}
            if left is chosen[0]:
                wanted |= {"run", "state"}
            entries.append(_linked(left, wanted, draft.path))
        entries.append(_of_lost_ranks(first, chosen, new_random, draft.path))
        return destination.path_of(destination.commit(called, name, entries, {}))
    except BaseException:
        draft.discard()
        raise


def _linked(left: _Left, wanted: set[str], folder: Path) -> Entry:
    files = {}
    for part in wanted & left.manifest.files.keys():
        _link(left.folder / file_of(part), folder / file_of(part))
        stored = left.manifest.files[part]
        files[file_of(part)] = {"bytes": stored.bytes, "sha256": stored.sha256}
    return {
        "files": files,
        "trees": {part: left.manifest.trees[part] for part in wanted},
        "not_finite": [],
    }


def _of_lost_ranks(
    first: Mapping[int, _Left],
    chosen: list[_Left],
    new_random: NewRandom,
    folder: Path,
) -> Entry:
    """What is a rank's own, for those that have left nothing."""
    alive = {left.rank for left in chosen}
    own = {}
    for rank in range(chosen[0].run["size"]):
        if rank in alive:
            continue
        twin = first[rank % chosen[0].places]
        part = f"rank-{twin.rank}"
        sync = checkpoint.read(twin.folder, {part}.__contains__)[part]["sync"]
        # Not the survivor's random state: both would draw the same.
        own[f"rank-{rank}"] = {"random": new_random(rank, twin.run["steps"]), "sync": sync}
    return checkpoint.write_parts(folder, own)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # not every file system can
        shutil.copy2(source, target)

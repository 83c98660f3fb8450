"""Checkpoints that are whole or not there: safetensors files and a manifest with their checksums.

    runs/digits/checkpoints/
      000003/               one checkpoint
        manifest.json       format, trees, and for every file its bytes and SHA-256; its own last
        model.safetensors   line of defence is a checksum of the manifest's text itself
        optimizer.safetensors
        …
      .000004.9f86d081.tmp/ being written, or left by a crash; never read

A folder is written under a temporary name that nobody else has, every file and the folder are
synced to disk, and only then is it renamed. A number that another job has taken meanwhile is not
written over: the next one is taken. So checkpoints stay whole also where several jobs save into
one folder because nothing could lock it. A reader refuses what does not match its checksums and
names the newest checkpoint that does.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from farandole.errors import CheckpointError
from farandole.serialization import pack, unpack
from farandole.train.checkpoint.finite_parts import not_finite_names
from farandole.train.checkpoint.manifest import NAME as MANIFEST
from farandole.train.checkpoint.manifest import (
    Entry,
    StoredFile,
    file_of,
    open_regular,
    read_manifest,
    write_manifest,
)

_HALF_WRITTEN = re.compile(r"\.\d+(\.[0-9a-f]+)?\.tmp")
_TAKEN = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})
"""What renaming a folder to a name that is taken can raise."""
_DAMAGE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RuntimeError,  # of torch, and RecursionError
    MemoryError,
    SafetensorError,
)
"""What reading a damaged checkpoint can raise."""


class RefusedCheckpointError(CheckpointError):
    """A checkpoint that cannot be used, and the `reason`; `last_good` is the newest that can."""

    def __init__(self, folder: Path, reason: str, last_good: Path | None) -> None:
        hint = "There is no other one beside it."
        if last_good is not None:
            hint = f"The last good one is {last_good}."
        super().__init__(f"checkpoint {folder} is refused: {reason}. {hint}")
        self.reason = reason
        self.last_good = last_good


# Writing takes three steps, so that several ranks can take part: rank 0 begins, every rank writes
# its parts, rank 0 commits. What goes wrong in them is `OSError` or `SafetensorError`.


def begin(folder: Path) -> Path:
    """A new folder to write to, beside `folder`, which will be the checkpoint or the one before."""
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.tmp")
    temporary.mkdir(parents=True)
    return temporary


def write_parts(temporary: Path, parts: Mapping[str, Any]) -> Entry:
    """Writes and syncs one file per part that has tensors."""
    files, trees = {}, {}
    for name, value in parts.items():
        trees[name], tensors = pack(value)
        if tensors:
            file = temporary / file_of(name)
            save_file(_storable(tensors), file)
            files[file.name] = {"bytes": file.stat().st_size, "sha256": _sync(file)}
    return {"files": files, "trees": trees, "not_finite": not_finite_names(parts)}


def commit(
    temporary: Path,
    folder: Path,
    entries: Sequence[Entry],
    metrics: Mapping[str, float] = MappingProxyType({}),
) -> Path:
    """Writes the manifest over all entries, and names the folder `folder` or by a later number.

    Returns what it is called now.
    """
    # Invariant: a folder with a number holds a whole checkpoint, also after the machine has lost
    # power at any point. That takes this order: the files (synced when they were written), the
    # manifest, the folder's entries, the rename, and the entry that the rename has changed.
    _sync(write_manifest(temporary, entries, metrics))
    _sync_folder(temporary)
    named = _rename(temporary, folder)
    _sync_folder(named.parent)
    return named


def _rename(temporary: Path, folder: Path) -> Path:
    """Gives `temporary` the name of `folder`, or the next number that nobody has.

    A rename never replaces a folder that holds anything, whatever others do at the same time.
    """
    while True:
        try:
            return temporary.rename(folder)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
        # Above all that are there and above the one that was tried: an empty folder, or a file, may
        # have the name and not count as a checkpoint.
        number = max(int(folder.name), int(next_name(folder.parent)) - 1) + 1
        folder = folder.with_name(_name(number))


def discard(temporary: Path) -> None:
    """Removes a half-written checkpoint. For whoever has begun it."""
    shutil.rmtree(temporary, ignore_errors=True)


def remove_half_written(folder: Path) -> None:
    """Removes what others have begun and not ended. For whoever holds the lock on `folder`."""
    # Without the lock this would remove what another job is writing now.
    for path in folder.iterdir():
        if _HALF_WRITTEN.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def out_of_room(error: Exception) -> str:
    """The reason of a failed save, where the disk is at fault and not the state."""
    return f"{error}. Free some space or pass another path."


def read(
    folder: Path,
    wanted: Callable[[str], bool] = lambda name: True,
    check: Callable[[Mapping[str, Any]], None] = lambda parts: None,
) -> dict[str, Any]:
    """The parts stored in `folder` whose name is `wanted`; only their files are read.

    Raises `RefusedCheckpointError` when anything is missing, cut short or altered, or does not pass
    the `check`, which raises `ValueError`.
    """
    try:
        parts = dict(_parts(folder, wanted))
        check(parts)
    except _DAMAGE as error:
        other = newest_good(folder.parent, other_than=folder)
        raise RefusedCheckpointError(folder, _reason(error), other) from error
    return parts


def not_finite(folder: Path) -> Sequence[str]:
    """Tensors in it that are not finite, as it says itself. Raises `OSError` or `ValueError`."""
    return read_manifest(folder).not_finite


def newest(folder: Path) -> Path | None:
    """The newest checkpoint in a folder of checkpoints, good or not; None when there is none."""
    found = _all(folder)
    return found[-1] if found else None


def newest_good(folder: Path, other_than: Path | None = None) -> Path | None:
    """The newest checkpoint in `folder` that can be read whole and is finite."""
    for candidate in reversed(_all(folder)):
        if other_than is not None and candidate.name == other_than.name:
            continue
        if is_finite(candidate) and _is_good(candidate):
            return candidate
    return None


def is_finite(folder: Path) -> bool:
    """Whether the manifest says that all tensors are finite. False if it cannot be read."""
    try:
        return not not_finite(folder)
    except _DAMAGE:
        return False


def next_name(folder: Path) -> str:
    """Checkpoints are numbered, so that the newest is the last by name."""
    last = newest(folder)
    return _name(int(last.name) + 1 if last else 0)


def names(folder: Path) -> list[str]:
    """Of all checkpoints in `folder`, oldest first."""
    return [path.name for path in _all(folder)]


def names_up_to(folder: Path) -> list[str]:
    """Of this checkpoint and of those beside it that are older; none if it has no number."""
    if not _is_numbered(folder):
        return []
    return [name for name in names(folder.parent) if int(name) <= int(folder.name)]


def has_others(folder: Path) -> bool:
    """Are there checkpoints beside this one?"""
    return any(name != folder.name for name in names(folder.parent))


def is_checkpoint(folder: Path) -> bool:
    """Is this one checkpoint, whole or not, rather than a folder of them?"""
    return os.path.lexists(folder / MANIFEST) or (_is_numbered(folder) and newest(folder) is None)


def best(folder: Path, own: Collection[str], metric: str, *, lower: bool) -> str | None:
    """Of one's `own` checkpoints that are finite, the one with the best value; the first such."""
    values: dict[str, float] = {}
    for path in _all(folder):
        if path.name in own:
            with contextlib.suppress(*_DAMAGE):
                manifest = read_manifest(path)
                if metric in manifest.metrics and not manifest.not_finite:
                    values[path.name] = manifest.metrics[metric]
    return (min if lower else max)(values, key=values.__getitem__, default=None)


def prune(folder: Path, keep: int, own: Collection[str], best: str | None = None) -> None:
    """Removes all but the newest `keep` of one's `own` checkpoints and the `best`; others' stay.

    The newest one that is finite stays too, however old it is.
    """
    mine = [path for path in _all(folder) if path.name in own]
    # A run that has diverged keeps saving. Without this its checkpoints would push out the last one
    # that it can go on from.
    old, new = mine[:-keep], mine[-keep:]
    if not any(map(is_finite, reversed(new))):
        last = next((path for path in reversed(old) if is_finite(path)), None)
        old = [path for path in old if path != last]
    for path in old:
        if path.name != best:
            _remove(path)


def _remove(path: Path) -> None:
    """The name goes first, so that a kill in the middle leaves no part of it under a number."""
    gone = path
    with contextlib.suppress(OSError):  # then as it is
        gone = path.rename(path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp"))
    shutil.rmtree(gone, ignore_errors=True)


def _all(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(filter(_is_numbered, folder.iterdir()), key=lambda path: int(path.name))


def _name(number: int) -> str:
    return f"{number:06d}"


def _is_numbered(path: Path) -> bool:
    return path.name.isascii() and path.name.isdigit() and path.is_dir()


def _parts(folder: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Any]]:
    manifest = read_manifest(folder)
    for name, tree in manifest.trees.items():
        if wanted(name):
            expected = manifest.files.get(name)
            tensors = _checked_tensors(folder / file_of(name), expected) if expected else {}
            yield name, unpack(tree, tensors)


def _reason(error: BaseException) -> str:
    kind = type(error).__name__
    if type(error) is ValueError and str(error):
        return str(error)
    return f"{kind}: {error}" if str(error) else kind


def _is_good(folder: Path) -> bool:
    try:
        for _ in _parts(folder, lambda name: True):  # one at a time: all may be larger than memory
            pass
    except _DAMAGE:
        return False
    return True


def _checked_tensors(file: Path, expected: StoredFile) -> dict[str, torch.Tensor]:
    with open_regular(file) as (handle, size):
        if size != expected.bytes:
            raise ValueError(f"{file.name} has {size} bytes instead of {expected.bytes}")
        if hashlib.file_digest(handle, "sha256").hexdigest() != expected.sha256:
            raise ValueError(f"{file.name} does not match its checksum")
    return load_file(file)


def _storable(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous CPU tensors of which no two share memory, as safetensors needs them."""
    storable, seen = {}, set()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        place = plain.untyped_storage().data_ptr()
        # A view of a larger tensor shares memory with tensors that come later, perhaps.
        if place in seen or plain.untyped_storage().nbytes() != plain.nbytes:
            plain = plain.clone()
        seen.add(place)
        storable[name] = plain
    return storable


def _sync(file: Path) -> str:
    """Forces `file` to disk; returns its checksum."""
    with file.open("rb") as handle:
        os.fsync(handle.fileno())
    return _sha256_file(file)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256_file(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()

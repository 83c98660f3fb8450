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

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from farandole.errors import CheckpointError
from farandole.train.packing import pack, unpack

_FORMAT = 1
_MANIFEST = "manifest.json"

_HALF_WRITTEN = re.compile(r"\.\d+(\.[0-9a-f]+)?\.tmp")
_TAKEN = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})
"""What renaming a folder to a name that is taken can raise."""

_DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError)
"""What reading a damaged checkpoint can raise."""

Entry = dict[str, Any]
"""What one writer adds to the manifest: its files with their checksums, and its trees."""


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
            file = temporary / f"{name}.safetensors"
            save_file(_storable(tensors), file)
            files[file.name] = {"bytes": file.stat().st_size, "sha256": _sync(file)}
    return {"files": files, "trees": trees}


def commit(temporary: Path, folder: Path, entries: Sequence[Entry]) -> Path:
    """Writes the manifest over all entries, and names the folder `folder` or by a later number.

    Returns what it is called now.
    """
    files = {name: item for entry in entries for name, item in entry["files"].items()}
    trees = {name: item for entry in entries for name, item in entry["trees"].items()}
    body = json.dumps({"format": _FORMAT, "files": files, "trees": trees})
    manifest = temporary / _MANIFEST
    manifest.write_text(json.dumps({"sha256": _sha256(body.encode()), "body": body}))
    _sync(manifest)
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
        number = max(int(folder.name), int(next_name(folder.parent)) - 1) + 1
        folder = folder.with_name(_name(number))


def discard(temporary: Path) -> None:
    """Removes a half-written checkpoint. For whoever has begun it."""
    shutil.rmtree(temporary, ignore_errors=True)


def remove_half_written(folder: Path) -> None:
    """Removes what others have begun and not ended. For whoever holds the lock on `folder`."""
    for path in folder.iterdir():
        if _HALF_WRITTEN.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def not_saved(folder: Path, reason: str) -> CheckpointError:
    """The error to raise."""
    last = newest_good(folder.parent)
    return CheckpointError(
        f"could not save to {folder}: {reason}"
        + (f" The last good checkpoint is {last}." if last else "")
    )


def out_of_room(error: Exception) -> str:
    """What to say when the disk, and not the state, is the reason."""
    return f"{error}. Free some space or pass another path."


def read(folder: Path, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Any]:
    """The parts stored in `folder` whose name is `wanted`; only their files are read.

    Raises `CheckpointError` when anything is missing, cut short or altered, and names the last
    good checkpoint beside it.
    """
    try:
        return _read(folder, wanted)
    except _DAMAGE as error:
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        other = newest_good(folder.parent, other_than=folder)
        hint = f"The last good one is {other}." if other else "There is no other one beside it."
        raise CheckpointError(f"checkpoint {folder} is refused: {reason}. {hint}") from error


def newest(folder: Path) -> Path | None:
    """The newest checkpoint in a folder of checkpoints, good or not; None when there is none."""
    found = _all(folder)
    return found[-1] if found else None


def newest_good(folder: Path, other_than: Path | None = None) -> Path | None:
    """The newest checkpoint in `folder` that can be read whole."""
    for candidate in reversed(_all(folder)):
        if other_than is not None and candidate.name == other_than.name:
            continue
        try:
            _read(candidate, lambda name: True)
        except _DAMAGE:
            continue
        return candidate
    return None


def next_name(folder: Path) -> str:
    """Checkpoints are numbered, so that the newest is the last by name."""
    last = newest(folder)
    return _name(int(last.name) + 1 if last else 0)


def names(folder: Path) -> list[str]:
    """Of all checkpoints in `folder`, oldest first."""
    return [path.name for path in _all(folder)]


def has_others(folder: Path) -> bool:
    """Are there checkpoints beside this one?"""
    return any(name != folder.name for name in names(folder.parent))


def is_checkpoint(folder: Path) -> bool:
    """Is this one checkpoint, whole or not, rather than a folder of them?"""
    return (folder / _MANIFEST).exists() or (_is_numbered(folder) and newest(folder) is None)


def prune(folder: Path, keep: int, own: Collection[str]) -> None:
    """Removes all but the newest `keep` of one's `own` checkpoints; others' stay."""
    for old in [path for path in _all(folder) if path.name in own][:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def _all(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(filter(_is_numbered, folder.iterdir()), key=lambda path: int(path.name))


def _name(number: int) -> str:
    return f"{number:06d}"


def _is_numbered(path: Path) -> bool:
    return path.name.isascii() and path.name.isdigit() and path.is_dir()


def _read(folder: Path, wanted: Callable[[str], bool]) -> dict[str, Any]:
    wrapper = json.loads((folder / _MANIFEST).read_text())
    if _sha256(wrapper["body"].encode()) != wrapper["sha256"]:
        raise ValueError(f"{_MANIFEST} does not match its own checksum")
    manifest = json.loads(wrapper["body"])
    if manifest["format"] != _FORMAT:
        raise ValueError(f"format {manifest['format']} is not the known format {_FORMAT}")
    parts = {}
    for name, tree in manifest["trees"].items():
        if wanted(name):
            file = folder / f"{name}.safetensors"
            expected = manifest["files"].get(file.name)
            parts[name] = unpack(tree, _checked_tensors(file, expected) if expected else {})
    return parts


def _checked_tensors(file: Path, expected: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    size = file.stat().st_size
    if size != expected["bytes"]:
        raise ValueError(f"{file.name} has {size} bytes instead of {expected['bytes']}")
    if _sha256_file(file) != expected["sha256"]:
        raise ValueError(f"{file.name} does not match its checksum")
    return load_file(file)


def _storable(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous CPU tensors of which no two share memory, as safetensors wants them."""
    storable, seen = {}, set()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        place = plain.untyped_storage().data_ptr()
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


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _sha256_file(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()

"""Writes the shards of a plan, each whole or not at all; goes on with what was interrupted."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

from farandole.data.pack.plan import PackedFile, PackedSample, PackPlan
from farandole.errors import DataError, FarandoleError, UserError
from farandole.files import write_whole

MANIFEST = "pack.json"


def write_shards(
    plan: PackPlan, target: Path, on_shard: Callable[[int], None] = lambda number: None
) -> int:
    """Returns how many shards were there already. `on_shard` is told of each that was written.

    Raises `UserError` for a target that holds anything but this plan's shards, `DataError` for a
    file that has changed since the plan was made.
    """
    _begin(plan, target)
    there = 0
    for number, samples in enumerate(plan.shards):
        path = target / plan.shard_name(number)
        if path.exists():
            there += 1
            continue
        _write_shard(path, samples)
        on_shard(number)
    _write_manifest(plan, target, complete=True)
    return there


def _begin(plan: PackPlan, target: Path) -> None:
    if target.resolve().is_relative_to(plan.folder.resolve()):
        raise UserError(f"{target} is within {plan.folder}, which is packed. Choose another place.")
    if target.exists() and not target.is_dir():
        raise UserError(f"{target} is no folder. Give a new folder for the shards.")
    inside = sorted(path.name for path in target.iterdir()) if target.exists() else []
    if inside and MANIFEST not in inside:
        raise UserError(
            f"{target} is not empty: it has {', '.join(inside[:3])}"
            f"{', …' if len(inside) > 3 else ''}. Give a new folder for the shards."
        )
    if inside:
        try:
            begun = json.loads((target / MANIFEST).read_text())["fingerprint"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{target / MANIFEST} cannot be read ({error!r}). Give a new folder."
            ) from error
        if begun != plan.fingerprint():
            raise UserError(
                f"{target} has shards of other files, or of other sizes of shards. Give a new "
                f"folder, or remove {target} first."
            )
        return
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{target} cannot be made: {error.strerror}.") from error
    _write_manifest(plan, target, complete=False)


def _write_manifest(plan: PackPlan, target: Path, *, complete: bool) -> None:
    record = {
        "fingerprint": plan.fingerprint(),
        "shards": len(plan.shards),
        "samples": plan.samples,
        "classes": list(plan.classes),
        "complete": complete,
    }
    write_whole(target / MANIFEST, (json.dumps(record, indent=2) + "\n").encode())


def _write_shard(path: Path, samples: Sequence[PackedSample]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as raw:
            with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
                for sample in samples:
                    _add(tar, sample)
            raw.flush()
            os.fsync(raw.fileno())
        temporary.replace(path)
    except OSError as error:
        raise FarandoleError(
            f"could not write {path}: {error.strerror or error}. The shards before it are whole: "
            "run the same command again to go on."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _add(tar: tarfile.TarFile, sample: PackedSample) -> None:
    for file in sample.files:
        tar.addfile(_header(file.name, file.size), io.BytesIO(_content(file)))
    if sample.label is not None:
        label = str(sample.label).encode()
        tar.addfile(_header(f"{sample.key}.cls", len(label)), io.BytesIO(label))


def _content(file: PackedFile) -> bytes:
    try:
        content = file.path.read_bytes()
    except OSError as error:
        raise DataError(f"{file.path} cannot be read: {error.strerror or error}.") from error
    if len(content) != file.size:
        raise DataError(
            f"{file.path} had {file.size} bytes when packing began, and has {len(content)} now. "
            "Pack into a new folder when nothing writes there."
        )
    return content


def _header(name: str, size: int) -> tarfile.TarInfo:
    """Of nobody and of no time: the same files make the same shards."""
    found = tarfile.TarInfo(name)
    found.size = size
    found.mode = 0o644
    return found

"""What is wrong before the job starts: its disk, its checkpoints, its names, its limits."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from faults.hooks import LOADER, NAN, STOPPED
from faults.place import Place
from faults.settings import HERE, NAME
from faults.slot import Slot
from faults.table import Drill

FOLDERS = {
    "a folder with spaces": "a job with  spaces",
    "a folder in Cyrillic": "обучение",
    "in Cyrillic under LC_ALL=POSIX": "обучение",
}
_LONG_NAME = "long" * 16


def place_for(action: str, slot: Slot) -> Place:
    """A place whose names are as odd as the action says."""
    temporary = "/".join([_LONG_NAME] * 3) if action == "a long TMPDIR" else None
    return Place(slot, FOLDERS.get(action, "job"), temporary)


def variables_for(drill: Drill) -> dict[str, str]:
    """What the script, or Python, is told."""
    role, action = drill.role, drill.action
    if action == "in Cyrillic under LC_ALL=POSIX":
        return {"LC_ALL": "POSIX", "LANG": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    if action == "NaN":
        return {NAN: role.removeprefix("rank ").removesuffix("'s data")}
    if drill.again and role == "launcher":
        return {STOPPED: "1"}
    return {LOADER: "1"} if role.startswith("loader's") else {}


def limits_for(action: str) -> list[str]:
    """A command that starts the job under a limit."""
    words = {
        "small files only": "ulimit -f 16",
        "16 open files": "ulimit -n 16",
        "1 GiB of addresses": "ulimit -v 1048576",
    }.get(action)
    return ["/bin/sh", "-c", f'{words} && exec "$@"', "sh"] if words else []


@contextlib.contextmanager
def disk_for(action: str, place: Place) -> Iterator[None]:
    """A real small or read-only file system where runs are kept; only root can mount one."""
    options = {"full disk": "size=64k", "read-only": "ro,size=64k"}.get(action)
    if options is None:
        yield
        return
    runs = place.folder / "runs"
    runs.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(runs)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(runs)], check=True)


def needs_root(action: str, setting: str) -> bool:
    return setting == "emulate" or action in ("full disk", "read-only")


def is_root() -> bool:
    return os.geteuid() == 0


def script_for(action: str, place: Place) -> Path:
    """The training script; where names are odd, a copy of it under an odd name."""
    if action not in FOLDERS:
        return HERE / "train.py"
    script = place.folder / f"{FOLDERS[action]}.py"
    for name in ("train.py", "hooks.py"):
        shutil.copy(HERE / name, script if name == "train.py" else place.folder / name)
    return script


def damage(action: str, checkpoints: Path) -> None:
    """Damages the newest checkpoint in a folder of them."""
    newest = sorted(path for path in checkpoints.iterdir() if path.name.isdigit())[-1]
    file = sorted(newest.glob("model*.safetensors"))[0]
    manifest = newest / "manifest.json"
    if action == "a flipped bit":
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    elif action == "a torn file":
        os.truncate(file, file.stat().st_size // 2)
    elif action == "a torn manifest":
        os.truncate(manifest, manifest.stat().st_size // 2)
    elif action == "a missing file":
        file.unlink()
    elif action == "resealed with ../":
        _escape(newest, manifest, file)
    else:
        raise ValueError(action)


def _escape(newest: Path, manifest: Path, file: Path) -> None:
    """A manifest with a right checksum that names a file outside of its folder."""
    outside = newest.parent.parent / file.name
    shutil.copy(file, outside)
    file.unlink()
    wrapper = json.loads(manifest.read_text())
    body = json.loads(wrapper["body"])
    for table, suffix in (("files", ".safetensors"), ("trees", "")):
        name = file.stem + suffix
        body[table][f"../../{name}"] = body[table].pop(name)
    text = json.dumps(body)
    seal = hashlib.sha256(text.encode()).hexdigest()
    manifest.write_text(json.dumps({**wrapper, "sha256": seal, "body": text}))


def write_discovery(place: Place) -> None:
    """What an elastic job asks for its hosts."""
    script = place.folder / "hosts.sh"
    script.write_text("#!/bin/sh\necho localhost:2\n")
    script.chmod(0o755)


def checkpoints_of(folder: Path) -> Path:
    return folder / "runs" / NAME / "checkpoints"

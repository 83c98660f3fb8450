"""Which checks were passed before: a model that has not changed need not be checked again.

A check is known by everything that decides what it finds: the code of all modules that are not
installed packages, the versions of those that matter, the model's structure and plain attributes,
the layout and the shapes of a batch. A change in any of them makes another name, and a new check.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import site
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

_PLAIN = (bool, int, float, str, type(None))


class PassedCheck:
    """One check, as a file in the user's cache."""

    def __init__(self, model: nn.Module, layout: str, device: torch.device, batch: Any) -> None:
        described = {
            "versions": [_version("farandole"), torch.__version__, sys.version],
            "code": _code(),
            "model": [_described(name, part) for name, part in model.named_modules()],
            "tensors": _shapes({**dict(model.named_parameters()), **dict(model.named_buffers())}),
            "layout": layout,
            "device": device.type,
            "batch": _shapes(batch),
        }
        text = json.dumps(described, sort_keys=True)
        self._file = _folder() / hashlib.sha256(text.encode()).hexdigest()

    def when(self) -> str:
        """The day it was passed; empty: it was not."""
        try:
            return time.strftime("%Y-%m-%d", time.localtime(self._file.stat().st_mtime))
        except OSError:
            return ""

    def note(self) -> None:
        """A cache that cannot be written is none: the next run checks again."""
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.touch()


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "farandole" / "self-check"


@functools.cache  # it is looked for on the disk
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _code() -> str:
    """A checksum of all loaded source files that are not installed packages."""
    installed = _installed()
    digest = hashlib.sha256()
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    for file in sorted(file for file in files if file and not file.startswith(installed)):
        with contextlib.suppress(OSError):
            found = os.stat(file)  # noqa: PTH116  # of hundreds of files; a Path takes longer
            # By content, not by date: a fresh checkout of the same code has passed already.
            digest.update(file.encode() + _checksum(file, found.st_mtime_ns, found.st_size))
    return digest.hexdigest()


@functools.cache
def _installed() -> tuple[str, ...]:
    """The folders of the standard library and of installed packages."""
    stdlib = sysconfig.get_path("stdlib")
    return (stdlib, *site.getsitepackages(), site.getusersitepackages())


@functools.cache
def _checksum(file: str, modified: int, size: int) -> bytes:
    """Of a file that has not changed since it was read."""
    return hashlib.sha256(Path(file).read_bytes()).digest()


def _described(name: str, module: nn.Module) -> list[Any]:
    """A module and what it carries: numbers and words as they are, other things by their kind."""
    kind = type(module)
    attributes = {
        key: value if isinstance(value, _PLAIN) else _kind(value)
        for key, value in vars(module).items()
        if key not in ("_parameters", "_buffers", "_modules")
    }
    package = kind.__module__.split(".")[0]
    installed = "" if package == "__main__" else _version(package)
    return [name, kind.__module__, kind.__qualname__, installed, module.extra_repr(), attributes]


def _kind(value: Any) -> str:
    if isinstance(value, (tuple, list, torch.Size, torch.dtype, torch.device)):
        return repr(value) if len(repr(value)) < 1000 else str(type(value))
    return f"{type(value)} {getattr(value, '__qualname__', '')}"


def _shapes(tree: Any) -> list[Any]:
    return [
        [pytree.keystr(path), str(leaf.dtype), list(leaf.shape)]
        if isinstance(leaf, torch.Tensor)
        else [pytree.keystr(path), str(type(leaf))]
        for path, leaf in pytree.tree_flatten_with_path(tree)[0]
    ]

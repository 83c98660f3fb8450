"""Which code is the user's own, and which values of other modules it mentions.

A forward may call `helpers.scale(x)`, which reads a global of another file. Files of the user are
followed; libraries (site-packages, Python's own, torch, this one) are not: they have caches and
counters of which none of this is meant.
"""

from __future__ import annotations

import argparse
import functools
import sys
import sysconfig
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import torch
from torch import nn

_INSTALLED = ("site-packages", "dist-packages")
_RECORDS = (SimpleNamespace, argparse.Namespace)


def is_of_the_user(module: str | None) -> bool:
    """Whether a module, by its name, is no library."""
    if not module or module.partition(".")[0] in ("torch", "farandole", "builtins"):
        return False
    loaded = sys.modules.get(module)
    if loaded is None:
        return False
    file = getattr(loaded, "__file__", None)
    return module == "__main__" if file is None else _is_of_the_user(file)


@functools.lru_cache(maxsize=4096)
def _is_of_the_user(file: str) -> bool:
    path = Path(file)
    if any(part in _INSTALLED for part in path.parts):
        return False
    libraries = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    return not any(path.is_relative_to(library) for library in libraries)


def is_record(value: Any) -> bool:
    """An object with settings: a namespace, or an instance of a class of the user."""
    if isinstance(value, _RECORDS):
        return True
    if isinstance(value, (type, nn.Module, torch.Tensor)) or not hasattr(value, "__dict__"):
        return False
    return is_of_the_user(type(value).__module__)


def names_in(code: CodeType) -> set[str]:
    """The names that code mentions, with those of the functions inside of it."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= names_in(constant)
    return found

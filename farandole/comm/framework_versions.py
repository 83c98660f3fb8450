"""Ranks with other versions of a framework: found out when they meet, not by wrong numbers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from farandole.comm.group import Group
from farandole.errors import UserError

_FRAMEWORKS = ("tensorflow", "keras", "jax")


def require_same_frameworks(group: Group, modules: Mapping[str, Any] = sys.modules) -> None:
    """*Together.* Raises `UserError` on every rank where two have imported different releases.

    Only the first two numbers of a version must agree: builds of one release have several names.
    A rank that has not imported a framework agrees with all.
    """
    everyone = group.gather_json(
        {name: str(modules[name].__version__) for name in _FRAMEWORKS if _is_there(modules, name)}
    )
    for name in _FRAMEWORKS:
        known = {rank: has[name] for rank, has in enumerate(everyone) if name in has}
        first = next(iter(known), None)
        for rank, version in known.items():
            assert first is not None
            if _release(version) != _release(known[first]):
                raise UserError(
                    f"the ranks have different releases of {name}: rank {first} has "
                    f"{known[first]}, and rank {rank} has {version}. Install the same on every "
                    "host, and start all workers with it."
                )


def _is_there(modules: Mapping[str, Any], name: str) -> bool:
    return getattr(modules.get(name), "__version__", None) is not None


def _release(version: str) -> list[str]:
    return version.split(".")[:2]

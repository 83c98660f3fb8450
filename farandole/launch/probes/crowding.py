"""More workers on a host than it has GPUs or cores: they share them, and the user is told."""

from __future__ import annotations

import os

from farandole.launch.host_facts import count_gpus
from farandole.launch.hosts import HERE
from farandole.launch.probes.problems import Problem, tell_warnings
from farandole.system.cores import usable_cores


def crowding(
    host: str, workers: int, cores: int, gpus: int, option: str | None = None
) -> list[Problem]:
    """Warnings where a host gets more workers than it has GPUs, or else cores.

    `option` is what the user writes before their number, if that is not the host with a colon.
    """
    kind, count = ("GPU", gpus) if gpus else ("core", cores)
    if workers <= count:
        return []
    text = f"{workers} workers share {count} {kind}{'s' if count != 1 else ''}."
    less = f"{f'{host}:' if option is None else option}{count}"
    return [Problem(host, "warning", text, f"Give it at most {count}: {less}")]


def places_here() -> tuple[str, int]:
    """What workers of this host compute on: its GPUs, or else its cores; and how many there are."""
    gpus = count_gpus(os.environ)
    return ("GPU", gpus) if gpus else ("core", usable_cores())


def warn_if_crowded(workers: int, option: str | None = None) -> None:
    """Where so many workers on this host are too many. Does not import torch."""
    tell_warnings(crowding(HERE, workers, usable_cores(), count_gpus(os.environ), option))

"""What an engine of `farandole run --on` is told: which job, on how many workers, with what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farandole.launch.job import Job


@dataclass(frozen=True)
class EngineRequest:
    """A job for `nodes` hosts with `per_node` workers each."""

    nodes: int
    per_node: int
    script: str
    command: tuple[str, ...]  # what follows `python`: a script and its arguments, or -m module …
    words: tuple[str, ...]  # `run` and the options of this job, less --on, --name and the engine's
    name: str | None  # of the run's folder
    runs: Path  # the folder of all runs
    grace_seconds: float
    restarts: int
    settings: Mapping[str, Any]  # the engine's own options, those that were given, by their names
    hosts: Mapping[str, int] | None  # slots by host, where the user has named hosts
    variables: Callable[[], dict[str, str]] = field(repr=False)
    """For workers that another launcher than ours starts: the variables that say what was asked."""
    job: Callable[[], Job] = field(repr=False)
    """For our own launcher."""

    @property
    def workers(self) -> int:
        return self.nodes * self.per_node

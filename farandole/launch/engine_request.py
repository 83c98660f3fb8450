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
    is_counted: bool  # the user has said how many; else an allocation is used as it is
    check: Callable[[int], None] = field(repr=False)
    """Raises `UserError` where the job cannot be one of so many workers."""
    variables: Callable[[int], dict[str, str]] = field(repr=False)
    """For so many workers, which another launcher than ours starts: what tells them what to do."""
    job: Callable[[int], Job] = field(repr=False)
    """Of so many workers, for our own launcher."""

    @property
    def workers(self) -> int:
        return self.nodes * self.per_node

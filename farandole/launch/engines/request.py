"""What an engine of `farandole run --on` is told: which job, on how many workers, with what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farandole.launch.job import Job
from farandole.launch.placement.placement import Placement
from farandole.topology import Topology


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
    interfaces: tuple[str, ...]  # that the hosts share, if the system shall not choose
    is_counted: bool  # `nodes` or `per_node` was given; else hosts that are known are used as is
    check: Callable[[int], None] = field(repr=False)
    """Raises `UserError` where the job cannot be one of so many workers."""
    variables: Callable[[int], dict[str, str]] = field(repr=False)
    """For so many workers, which another launcher than ours starts: what tells them what to do."""
    job: Callable[[Topology], Job] = field(repr=False)
    """On these hosts, for our own launcher."""
    placement: Callable[[], Placement] = field(repr=False)
    """The hosts that the user or a scheduler names, with as many workers as -n says or as there are
    slots; else this host."""

    @property
    def workers(self) -> int:
        return self.nodes * self.per_node

"""What a job needs of other hosts beside its script, and what is known to be wrong with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from farandole.launch.probes.problems import Problem


@dataclass(frozen=True)
class Requirements:
    """All hosts must see the `shared_folders` of this one."""

    files: Sequence[str] = ()  # that must be there, too
    shared_folders: Sequence[Path] = ()
    unreachable: Mapping[str, Problem] = field(default_factory=dict)  # no way leads to these hosts

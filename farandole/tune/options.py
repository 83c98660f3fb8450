"""The options of `farandole tune`, and which of them a study is known by."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farandole.errors import UserError
from farandole.launch.placement.placement import HostOptions
from farandole.report.target import lower_is_better


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """As given; None: not given. `command` is the script and its arguments."""

    command: tuple[str, ...]
    workers: int
    trials: int | None = None
    metric: str
    direction: str | None = None
    sampler: str = "tpe"
    pruner: str = "median"
    storage: Path | None = None
    parallel: int | None = None
    timeout: float | None = None
    syncs: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    where: HostOptions = field(default_factory=HostOptions)
    runs: Path = Path("runs")
    seed: int = 0
    grace: float = 30.0
    ensemble: int | None = None
    populations: int | None = None
    interval: int = 1  # epochs
    generations: int | None = None

    @property
    def higher_is_better(self) -> bool:
        if self.direction is None:
            return not lower_is_better(self.metric)
        return self.direction == "maximize"

    def identity(self) -> dict[str, Any]:
        """What two parts of one study must have in common, or their values cannot be compared."""
        return {
            "script": Path(self.command[0]).name,
            "arguments": shlex.join(self.command[1:]),
            "metric": self.metric,
            "direction": "maximize" if self.higher_is_better else "minimize",
            "workers": self.workers,
            "sync": list(self.syncs),
            "layout": list(self.layouts),
            "population": [self.populations, self.interval] if self.populations else None,
        }

    def check(self) -> None:
        """Raises `UserError` for values that cannot work."""
        if self.populations is not None:
            self._check_population()
        elif self.trials is None:
            raise UserError("how many trials? Give --trials 40, say, or --populations 8.")
        elif self.generations is not None:
            raise UserError("--generations is for --populations N. Give both, or --trials.")
        for name in ("workers", "trials", "parallel", "ensemble", "interval", "generations"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name} {value}: give 1 or more.")
        if self.timeout is not None and not 0 < self.timeout < float("inf"):
            raise UserError(f"--timeout {self.timeout:g}: give the seconds of a trial, above 0.")
        for option, values in (("--sync", self.syncs), ("--layout", self.layouts)):
            twice = next((value for value in values if values.count(value) > 1), None)
            if twice is not None:
                raise UserError(f"{option} {twice} is given twice.")

    def _check_population(self) -> None:
        if self.populations is None or self.populations < 2:
            raise UserError(f"--populations {self.populations}: members learn from others; give 2.")
        if self.trials is not None:
            raise UserError(
                f"--trials {self.trials} and --populations {self.populations}: a population has "
                "generations in place of trials. Give one of the two."
            )
        if self.generations is None:
            raise UserError(
                "--populations: say with --generations N how many intervals they train."
            )
        if self.syncs or self.layouts:
            raise UserError(
                "--populations: members go on from each other's checkpoints, so strategy and "
                "layout are those of the script. Leave out --sync and --layout."
            )

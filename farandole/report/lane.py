"""One run in a race, and the measures that need nothing but that run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from farandole.report import units
from farandole.report.history import History

Outcome = Literal["ok", "failed", "unfinished", "stopped", "running", "waiting"]
"""`stopped`: by the race, which had seen enough. `unfinished`: by something else."""


@dataclass(frozen=True)
class MeasuredLink:
    """What the network between hosts can do."""

    message_seconds: float
    bytes_per_second: float
    age_seconds: float = 0.0  # how long before the run it was measured

    def __str__(self) -> str:
        rate = units.bytes_count(self.bytes_per_second)
        minutes = self.age_seconds / 60
        ago = f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.0f} h"
        age = f" (measured {ago} before)" if minutes >= 1 else ""
        return f"{self.message_seconds * 1000:.3g} ms per message, {rate}/s{age}"


@dataclass(frozen=True)
class Lane:
    """What was asked for, how it went, and what it logged.

    `sync` is the text the user gave, or `serial`, and `layout` likewise; what is empty was left to
    the script. `workers` is the number of processes. `command` is what one types to run this lane
    alone, `problem` one line on why it failed or was stopped. A lane that never logged has an empty
    `History()`. `price` is in any unit of money; None: nobody said one.
    """

    sync: str
    workers: int
    outcome: Outcome
    history: History
    command: str = ""
    problem: str = ""
    layout: str = ""
    seed: int | None = None
    price: float | None = None  # of a worker-hour
    folder: Path | None = None  # where it has left its files

    @property
    def name(self) -> str:
        """Where the model lives and how replicas stay in step: `stages=4,microbatches=8 · daso`."""
        return " · ".join(filter(None, (self.layout, self.sync)))

    @property
    def total_seconds(self) -> float:
        """Up to the last thing the run wrote: its end, or, if it never ended, its last record."""
        return self.history.last.time_seconds

    @property
    def startup_seconds(self) -> float | None:
        """From the start of its processes until `fd.init()` was done, where its time begins."""
        seconds = self.history.start.get("startup_seconds")
        return float(seconds) if isinstance(seconds, int | float) else None

    @property
    def link(self) -> MeasuredLink | None:
        """Between its hosts, as the run measured it; None on one host."""
        said = self.history.start.get("link")
        if not isinstance(said, Mapping):
            return None
        seconds, rate = said.get("message_seconds"), said.get("bytes_per_second")
        if not isinstance(seconds, int | float) or not isinstance(rate, int | float):
            return None
        age = said.get("age_seconds")
        age_seconds = float(age) if isinstance(age, int | float) else 0.0
        return MeasuredLink(float(seconds), float(rate), age_seconds)

    @property
    def simulated_link(self) -> str:
        """The link in software between its pretended hosts; empty: there was none."""
        return str(self.history.start.get("simulated_link") or "")

    @property
    def samples_per_second(self) -> float | None:
        """Samples over all workers, by total time: evaluation and start-up are in it."""
        total = self.total_seconds
        return self.history.last.samples / total if total > 0 else None

    @property
    def waited_seconds(self) -> float:
        return self.history.last.waited_seconds

    @property
    def waited_share(self) -> float | None:
        """The part of the total time that rank 0 stood waiting for communication."""
        return self.waited_seconds / self.total_seconds if self.total_seconds > 0 else None

    @property
    def bytes_sent(self) -> int:
        """What rank 0 sent."""
        return self.history.last.bytes_sent

    @property
    def gpu_peak_bytes(self) -> int | None:
        """What the tensors of a rank took of its GPU at most, of all ranks; None: without GPUs."""
        return max(self.history.gpu_peak_bytes, default=None)

    @property
    def energy_joules(self) -> float | None:
        return self.history.last.energy_joules

    @property
    def no_energy(self) -> str:
        """Why its energy is not known; empty where it is, or where the run said nothing."""
        return str(self.history.start.get("no_energy") or "")

    def cost(self, seconds: float | None) -> float | None:
        """Of all workers for so long; None without a price."""
        if self.price is None or seconds is None:
            return None
        return self.price * self.workers * seconds / 3600


def outcome_of(history: History, exit_code: int | None) -> Outcome:
    """How a run stands: `exit_code` is its process's, or None while that is alive."""
    if exit_code is None:
        return "running"
    if exit_code != 0:
        return "failed"
    return "ok" if history.finished else "unfinished"


def labels(lanes: Sequence[Lane]) -> list[str]:
    """A distinct label for each lane: its name, and its seed or a number when it is run twice."""
    count = Counter(lane.name for lane in lanes)
    seeds = Counter((lane.name, lane.seed) for lane in lanes)
    seen: Counter[str] = Counter()
    distinct = []
    for lane in lanes:
        seen[lane.name] += 1
        again = ""
        if count[lane.name] > 1:
            alone = lane.seed is not None and seeds[lane.name, lane.seed] == 1
            again = f" (seed {lane.seed})" if alone else f" ({seen[lane.name]})"
        distinct.append(lane.name + again)
    return distinct

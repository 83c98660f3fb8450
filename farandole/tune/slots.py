"""How many trials run at the same time, and what each of them gets of cores, GPUs and hosts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from farandole.launch.job_directory import worker_defaults
from farandole.system.cores import usable_cores


@dataclass(frozen=True)
class Share:
    """What keeps a trial to its part of the machines."""

    workers_here: int  # on this host
    variables: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()  # options of `farandole run`
    place: str = ""  # as it is told


class Slots:
    """Trials of `workers` workers each: as many at a time as there are shares."""

    def __init__(self, workers: int, shares: Sequence[Share], *, alone: bool = True) -> None:
        self.workers = workers
        self.alone = alone  # no trial has workers on other hosts
        self._shares = list(shares)
        self._free = list(range(len(shares)))

    @property
    def parallel(self) -> int:
        return len(self._shares)

    @property
    def workers_here(self) -> int:
        """Those of all trials that run at the same time."""
        return sum(share.workers_here for share in self._shares)

    def take(self) -> int | None:
        """The number of a free slot; None: there is none."""
        return self._free.pop(0) if self._free else None

    def give_back(self, slot: int) -> None:
        self._free.append(slot)
        self._free.sort()

    def share(self, slot: int) -> Share:
        return self._shares[slot]

    def __str__(self) -> str:
        trials = f"{self.parallel} trial{'s' if self.parallel > 1 else ''} at a time"
        text = f"{trials}, on {self.workers} worker{'s' if self.workers > 1 else ''} each"
        places = [share.place for share in self._shares if share.place]
        return f"{text}: {'; '.join(places)}" if places else text


def slots_here(
    workers: int, parallel: int | None, gpus: int, environ: Mapping[str, str] = os.environ
) -> Slots:
    """All on this host. A GPU, if there are any, else a core, is for one worker."""
    count = parallel or max(1, (gpus or usable_cores()) // workers)
    named = visible(gpus, environ)
    defaults = worker_defaults(workers * count, alone=True)
    threads = {key: defaults[key] for key in ("OMP_NUM_THREADS",) if key in defaults}
    shares = [
        Share(workers, {**threads, **gpus_of(slot * workers, workers, named)})
        for slot in range(count)
    ]
    return Slots(workers, shares)


def gpus_of(first: int, workers: int, gpus: Sequence[str]) -> dict[str, str]:
    """For a trial whose first worker is the `first` of its host; empty: there are no GPUs."""
    own = [gpus[(first + i) % len(gpus)] for i in range(workers)] if gpus else []
    return {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(own))} if own else {}


def visible(gpus: int, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Their names, of which the user may have given some."""
    said = environ.get("CUDA_VISIBLE_DEVICES")
    if said:
        return [name.strip() for name in said.split(",") if name.strip()][:gpus]
    return [str(number) for number in range(gpus)]

"""How many trials run at once on this machine, and which cores or GPUs each of them gets."""

from __future__ import annotations

import os
from collections.abc import Mapping

from farandole.launch.job_directory import worker_defaults
from farandole.system.cores import usable_cores


class Slots:
    """Trials of `workers` workers each. A GPU, if there are any, else a core, is for one worker."""

    def __init__(
        self, workers: int, parallel: int | None, gpus: int, environ: Mapping[str, str] = os.environ
    ) -> None:
        self.workers = workers
        self.parallel = parallel or max(1, (gpus or usable_cores()) // workers)
        self._gpus = _visible(gpus, environ)
        self._free = list(range(self.parallel))

    @property
    def at_once(self) -> int:
        """The workers of all trials that run at the same time."""
        return self.workers * self.parallel

    def take(self) -> int | None:
        """The number of a free slot; None: there is none."""
        return self._free.pop(0) if self._free else None

    def give_back(self, slot: int) -> None:
        self._free.append(slot)
        self._free.sort()

    def variables(self, slot: int) -> dict[str, str]:
        """What keeps a trial to its share of the machine."""
        share = worker_defaults(self.at_once, alone=True)
        found = {key: share[key] for key in ("OMP_NUM_THREADS",) if key in share}
        if self._gpus:
            first = slot * self.workers
            own = [self._gpus[(first + i) % len(self._gpus)] for i in range(self.workers)]
            found["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(own))
        return found


def _visible(gpus: int, environ: Mapping[str, str]) -> list[str]:
    said = environ.get("CUDA_VISIBLE_DEVICES")
    if said:
        return [name.strip() for name in said.split(",") if name.strip()][:gpus]
    return [str(number) for number in range(gpus)]

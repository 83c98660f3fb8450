"""How busy GPUs are while a trial is measured."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace
from statistics import fmean

from farandole.errors import UserError
from farandole.launch.gpu.nvidia_smi import GpuUse, gpu_use
from farandole.launch.gpu.trial_table import Trial

_APART_SECONDS = 0.5


class UseSampler:
    """Of the GPUs with these UUIDs. Where the driver does not tell, nothing is known."""

    def __init__(self, uuids: Collection[str]) -> None:
        self._uuids = set(uuids)
        self._seen: list[GpuUse] = []
        self._looked = 0.0

    def sample(self) -> None:
        """Call it often; it looks now and then."""
        now = time.monotonic()
        if now - self._looked < _APART_SECONDS:
            return
        self._looked = now
        try:
            self._seen += [use for use in gpu_use() if use.uuid in self._uuids]
        except UserError:  # it answered before: figures for the table are no reason to stop
            return

    def added_to(self, trial: Trial) -> Trial:
        busy = [use.busy_percent for use in self._seen if use.busy_percent is not None]
        used = [use.used_mib for use in self._seen if use.used_mib is not None]
        total = [use.total_mib for use in self._seen if use.total_mib is not None]
        return replace(
            trial,
            busy_percent=fmean(busy) if busy else None,
            used_mib=max(used, default=None),
            total_mib=max(total, default=None),
        )

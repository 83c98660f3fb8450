"""The loader of `farandole bench data`: what a script reads, measured in three ways in one pass.

    warm-up │ both: batches as ever │ model alone: one batch again and again │ the script is ended
                                                                   input alone: batches, no model ┘

The script only sees a loop over batches. When all is measured, it ends: SystemExit, with success.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch

from farandole.data.bench.stage_times import time_stages
from farandole.data.chunks.dataset import ChunkedDataset
from farandole.data.device import to_device
from farandole.data.loader import Loader
from farandole.errors import UserError
from farandole.files import write_whole

_STAGED_BATCHES: Final = 4
_END: Any = object()


class BenchLoader(Loader):
    """`bench` is the file that rank 0 writes, and how many batches are timed and not timed."""

    bench: tuple[Path, int, int]

    def __iter__(self) -> Iterator[Any]:
        if not self.is_training:
            yield from super().__iter__()
            return
        handed_out = 0
        try:
            for batch in self._measured():
                handed_out += 1
                yield batch
        except GeneratorExit:
            self._write({"left_after": handed_out})
            raise
        raise SystemExit(0)

    def _measured(self) -> Iterator[Any]:
        _, wanted, warm_up = self.bench
        there = None if self.shares is None else len(self)
        if there is not None and there < 3:
            raise UserError(f"a pass of {there} steps is too short to measure: 3 are needed.")
        warm = warm_up if there is None else min(warm_up, there - 2)
        count = wanted if there is None else min(wanted, there - warm)
        found: dict[str, Any] = self._circumstances()
        batches = super().__iter__()
        began, samples, kept, kept_samples = 0.0, 0, _END, 0
        for number in range(warm + count):
            if number == warm:
                began = self._now()
            batch = next(batches, _END)
            if batch is _END:
                break
            assert self.last_batch is not None
            if self.last_batch.samples > kept_samples:
                kept, kept_samples = batch, self.last_batch.samples
            samples += self.last_batch.samples if number >= warm else 0
            yield batch
        if not samples:
            raise UserError(f"the data end within the warm-up of {warm} batches: give --warmup 0.")
        found["both"] = samples / (self._now() - began)
        began = self._now()
        for _ in range(count):
            yield kept
        found["model"] = kept_samples * count / (self._now() - began)
        batches.close()  # type: ignore[attr-defined]  # it is a generator
        found["input"] = self._input_alone(count)
        found["stages"] = self._stages()
        self._write(found)

    def _input_alone(self, count: int) -> float:
        batches = super().__iter__()
        next(batches)  # processes start for it
        began, samples = self._now(), 0
        for _ in islice(batches, count):
            assert self.last_batch is not None
            samples += self.last_batch.samples
        rate = samples / (self._now() - began)
        batches.close()  # type: ignore[attr-defined]
        return rate

    def _stages(self) -> dict[str, float]:
        """Of this rank's own samples. A stream has none that could be read again."""
        sampler = self.batch_sampler
        if sampler is None:
            return {}

        def copied(batch: Any) -> None:
            to_device(batch, self._device)
            self._settle()

        indices = list(islice(sampler, _STAGED_BATCHES))
        return time_stages(self._resolved.dataset, indices, self.collate_fn, copied)

    def _circumstances(self) -> dict[str, Any]:
        return {
            "ranks": self._group.size,
            "global_batch": self.options.global_batch(self._group.size),
            "num_workers": self.num_workers,
            "pin_memory": self.pin_memory,
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
            "device": str(self._device),
            "chunked": isinstance(self._resolved.dataset, ChunkedDataset),
        }

    def _now(self) -> float:
        self._settle()
        return time.perf_counter()

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _write(self, found: dict[str, Any]) -> None:
        if self._group.rank == 0:
            write_whole(self.bench[0], json.dumps(found).encode())

"""What collectives returned before the training, for workers that start when it runs already.

Such a worker runs the script from the top, and all that the script asks of other ranks on the way,
they have answered each other long ago. Rank 0 writes the answers to the launcher's store; a
newcomer reads them there. Large tensors are left out: a model, which is sent when the worker joins.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store

from farandole.errors import JoinError
from farandole.serialization.objects import dump, load

_MOST_BYTES = 1 << 20
_LEFT_OUT = b"-"
_END = "end"


class SetupLog:
    """Of one phase: before the training, or before the first batch of an epoch."""

    def __init__(self, store: Store, phase: str, patience: timedelta) -> None:
        self.phase = phase
        self._store = store
        self._patience = patience
        self.entries = 0

    def write(self, result: object, *, writes: bool) -> None:
        """One more. All ranks count them; the one that `writes` keeps it."""
        self.entries += 1
        if not writes:
            return
        data = _LEFT_OUT
        if not isinstance(result, torch.Tensor) or result.nbytes <= _MOST_BYTES:
            written = bytes(dump(result))
            data = written if len(written) <= _MOST_BYTES else _LEFT_OUT
        self._store.set(self._key(self.entries), data)  # type: ignore[arg-type]

    def end(self, *, writes: bool) -> None:
        """No more will follow."""
        if writes:
            self._store.set(self._key(_END), str(self.entries))

    def read(self, changed: torch.Tensor | None) -> Any:
        """The next one; it is put into `changed`, if given. Raises `JoinError`."""
        self.entries += 1
        data = self._wait_for_entry()
        if data != _LEFT_OUT:
            value = load(data)
            return value if changed is None else changed.detach().copy_(value)
        if changed is None:
            raise JoinError(
                f"collective {self.entries} of the script {self.phase} had a large result, which "
                "is not kept for workers that join later. Compute it on every rank, or after the "
                "training has begun."
            )
        return changed

    def _wait_for_entry(self) -> bytes:
        deadline = time.monotonic() + self._patience.total_seconds()
        key, end = self._key(self.entries), self._key(_END)
        while True:
            try:
                if self._store.check([key]):
                    return self._store.get(key)
                if self._store.check([end]) and int(self._store.get(end)) < self.entries:
                    raise JoinError(
                        f"this worker joins a job that is under way, and its script calls "
                        f"collective {self.entries} {self.phase}; the others called "
                        f"{self.entries - 1}. All ranks must call the same ones."
                    )
            except dist.DistError as error:
                raise JoinError(f"the launcher's store does not answer: {error}") from error
            if time.monotonic() > deadline:
                raise JoinError(
                    f"this worker joins a job that is under way, and waited "
                    f"{self._patience.total_seconds():g} s for the others to call collective "
                    f"{self.entries} {self.phase}."
                )
            time.sleep(0.02)

    def _key(self, entry: int | str) -> str:
        return f"log/{self.phase}/{entry}"

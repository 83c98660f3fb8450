"""The ranks' steps, combined by Adasum: each steps by its own gradients first.

What is combined are the changes that the step makes to the parameters, so that momentum and
adaptive rates are in them. The optimizer's state stays each rank's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from farandole.horovod import session
from farandole.horovod.common.process_sets import ProcessSet
from farandole.horovod.torch.compression import Compressor
from farandole.horovod.torch.operations import Adasum
from farandole.horovod.torch.reductions import allreduce_async_


class AdasumSteps:
    """Of one optimizer."""

    def __init__(
        self,
        names: dict[nn.Parameter, str],
        compression: type[Compressor],
        process_set: ProcessSet,
    ) -> None:
        self._names = names if process_set.included() else {}
        self._compression = compression
        self._process_set = process_set
        session.current().optimizer_number(self, process_set)

    def add(self, names: dict[nn.Parameter, str]) -> None:
        """Takes on further parameters."""
        if self._process_set.included():
            self._names.update(names)

    @contextmanager
    def combined(self) -> Iterator[None]:
        """Around a step of this rank: after it, the parameters have taken all ranks' steps."""
        begin = {p: p.detach().clone() for p in self._names}
        yield
        number = session.current().optimizer_number(self, self._process_set)
        flights = []
        with torch.no_grad():
            for p, start in begin.items():
                small, context = self._compression.compress(p.detach() - start)
                name = f"step.{number}.{self._names[p]}"
                handle = allreduce_async_(
                    small, name=name, op=Adasum, process_set=self._process_set
                )
                flights.append((p, start, handle, context))
            for p, start, handle, context in flights:
                p.copy_(start + self._compression.decompress(handle.wait(), context))

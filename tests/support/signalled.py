"""A model that ends or stops the processes that compute it, apart from the tests that use it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn


class Signalled(nn.Module):
    """`inner`. The first processes but this one that compute it get one of the signals each, and
    leave a file in `folder`."""

    def __init__(self, inner: nn.Module, folder: Path, signals: Sequence[int]) -> None:
        super().__init__()
        self.inner = inner
        self.folder, self.signals = folder, signals
        self.parent = os.getpid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if os.getpid() != self.parent:
            for number, signal in enumerate(self.signals):
                try:
                    (self.folder / str(number)).touch(exist_ok=False)
                except FileExistsError:
                    continue
                os.kill(os.getpid(), signal)
                break
        found: torch.Tensor = self.inner(x)
        return found

"""What is trained, in float64, and what each worker writes down about it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

SAMPLES = 20_000
GLOBAL_BATCH = 256
SAVE_SECONDS = 5.0


class Numbers(Dataset[Any]):
    """Made by a formula, so that any process has the same."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(SAMPLES, 64, generator=generator, dtype=torch.float64)
        self.y = (self.x[:, :10] * self.x[:, 10:20]).argmax(1)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.x[index], self.y[index], index


def new_model() -> nn.Module:
    torch.manual_seed(6)
    layers = [nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 10)]
    return nn.Sequential(*layers).double()


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


class Notes:
    """One worker's: its process, when it finished which step, and the samples of each step."""

    def __init__(self, folder: Path, worker: str) -> None:
        (folder / f"pid-{worker}").write_text(str(os.getpid()))
        self._file = (folder / f"steps-{worker}").open("a", buffering=1)

    def reads(self, step: int, epoch: int, samples: list[int]) -> None:
        """Before the step: of a worker that is killed in it, it may be part of the average."""
        self._file.write(json.dumps(["reads", step, epoch, samples]) + "\n")

    def stepped(self, step: int) -> None:
        self._file.write(json.dumps(["stepped", step, time.monotonic()]) + "\n")

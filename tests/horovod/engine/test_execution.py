"""On which GPU the tensors of a round are worked on, whatever thread drives it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from farandole.comm import Group
from farandole.horovod.engine.execution import Executor
from farandole.testing import run_world
from farandole.train import Run


class OnGpu(torch.Tensor):
    is_cuda = True

    def get_device(self) -> int:
        return 2


class Given:
    """As a piece of work."""

    inputs = (torch.zeros(1).as_subclass(OnGpu),)


def chosen(group: Group, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(torch.cuda, "device", lambda number: nullcontext(number))
    executor = Executor(group)

    def gpu(device: str, *works: Any) -> Any:
        with executor._on_gpu(device, works) as number:
            return number

    found = [gpu("cuda", None)]  # nothing is known
    executor.remember_gpu()  # CUDA is not in use
    found.append(gpu("cuda", None))
    with monkeypatch.context() as used:
        used.setattr(torch.cuda, "is_initialized", lambda: True)
        used.setattr(torch.cuda, "current_device", lambda: 3)
        executor.remember_gpu()  # in the script's thread, when it joins
    found += [gpu("cuda", None), gpu("cpu", Given()), gpu("cuda", None, Given()), gpu("cuda", None)]
    return found


def test_the_gpu_of_this_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def body(run: Run) -> list[Any]:
        return chosen(run.group, monkeypatch)

    assert run_world(1, body, folder=tmp_path) == [[None, None, 3, None, 2, 2]]

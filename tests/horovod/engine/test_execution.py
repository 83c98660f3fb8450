"""On which GPU the tensors of a round are worked on, whatever thread drives it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from farandole.comm import Group
from farandole.horovod.engine.execution import Executor
from farandole.horovod.engine.requests import ALLREDUCE, Request
from farandole.horovod.engine.table import Item, Response
from farandole.horovod.engine.work import Work
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


class Noted:
    """A moment on a GPU, or its stream: notes who waits for it, and what `output` was then."""

    def __init__(self, what: str, order: list[tuple[str, float]], output: torch.Tensor) -> None:
        self._what, self._order, self._output = what, order, output

    def synchronize(self) -> None:
        self._order.append((self._what, self._output[0].item()))


def test_alone_on_a_gpu_other_streams_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The script may compute on one of its own, before and after."""
    order: list[tuple[str, float]] = []
    output = torch.zeros(3)
    request = Request("x", ALLREDUCE, ("float32",), ((3,),), "sum", device="cuda")
    work = Work(request, [torch.ones(3)], [output])
    work.ready = Noted("the inputs", order, output)  # type: ignore[assignment]
    stream = Noted("the outputs", order, output)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)

    def body(run: Run) -> None:
        Executor(run.group).carry_out(Response((Item((request,)),)), [work])

    run_world(1, body, folder=tmp_path)
    assert order == [("the inputs", 0.0), ("the outputs", 1.0)]

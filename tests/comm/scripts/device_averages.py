"""device_averages.py: averages of gradients on GPUs, between two processes over gloo.

The tensors only say that they are on GPUs.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
from worlds import run_world

from farandole.comm import Group
from farandole.comm.gpu.device_average import DeviceAverage
from farandole.errors import CommError
from farandole.system.activity import NO_ACTIVITY, Activity


class OnGpu(torch.Tensor):
    is_cuda = True


class Noted(Activity):
    def __init__(self) -> None:
        self.heard: list[object] = []

    def begin_wait(self) -> None:
        self.heard.append("begin")

    def end_wait(self) -> None:
        self.heard.append("end")

    def needs_others(self, is_over: Callable[[], bool]) -> None:
        self.heard.append(is_over())


def on_gpu(value: float) -> torch.Tensor:
    return torch.full((1000,), value).as_subclass(OnGpu)


def refusal(group: Group) -> str:
    try:
        group.average_future(on_gpu(1.0)).wait()
    except CommError as error:
        return str(error)
    raise AssertionError("there is nobody to average with")


def body(group: Group) -> None:
    group.barrier()
    # What was begun before goes first, whichever rank comes late.
    metric, gradient = torch.ones(1000), on_gpu(float(100 * group.rank))
    handle = group.start(group.all_reduce, metric, algorithm="native")
    if group.rank == 1:
        time.sleep(0.5)
    average = group.average_future(gradient)
    assert isinstance(average, DeviceAverage)
    average.wait()
    assert average.done()
    group.meter.activity = noted = Noted()
    of_the_rest = group.average_future(on_gpu(1.0))
    assert isinstance(of_the_rest, DeviceAverage)
    assert not noted.heard, "the others are needed by whoever waits"
    of_the_rest.wait()
    assert noted.heard == ["begin", "end", True]
    group.meter.activity = NO_ACTIVITY
    handle.wait()
    assert (metric[0], gradient[0]) == (2, 50), (metric[0], gradient[0])
    group.barrier()
    if group.rank == 1:
        os._exit(0)
    time.sleep(0.3)  # so that its end is heard of
    first = refusal(group)
    assert first.startswith("all_reduce failed on rank 0 of 2: rank 1 "), first
    assert group.is_broken
    assert "the group was broken by an earlier failure: rank 1 " in refusal(group)


if not run_world("c10d", 2, timedelta(seconds=20), body):
    sys.exit(1)

"""Trying a model out without a trace: whatever a forward pass changes is put back.

Random states are those of the process. Where ranks are threads, one after the other tries.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

_ALONE = threading.RLock()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """For what changes torch itself for a while, as torch.fx does with `nn.Module.__call__`: two
    threads that did so at once would put each other's changes back."""
    with _ALONE:
        yield


@contextmanager
def left_as_they_were(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, modules may be run. Buffers, gradients, modes and random states are put back."""
    with one_at_a_time(), _put_back(modules):
        yield


@contextmanager
def _put_back(modules: Sequence[nn.Module]) -> Iterator[None]:
    parts = {part for module in modules for part in module.modules()}
    buffers = [
        (part, name, buffer, buffer.clone())
        for part in parts
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    gradients = {weight: weight.grad for module in modules for weight in module.parameters()}
    drawn, drawn_by_numpy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    modes = {part: part.training for part in parts}
    for weight in gradients:
        weight.grad = None
    try:
        with torch.random.fork_rng(devices), torch.enable_grad():
            yield
    finally:
        for part, training in modes.items():
            part.training = training
        random.setstate(drawn)
        np.random.set_state(drawn_by_numpy)
        for weight, gradient in gradients.items():
            weight.grad = gradient
        with torch.no_grad():
            for part, name, buffer, copy in buffers:
                part._buffers[name] = buffer
                buffer.copy_(copy)

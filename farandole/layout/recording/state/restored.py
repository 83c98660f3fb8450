"""Runs a model and then puts back whatever its forward pass has changed.

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

from farandole.layout.recording.state.code_state import CodeState

_ALONE = threading.RLock()


@contextmanager
def process_lock() -> Iterator[None]:
    """For what changes torch itself for a while, as torch.fx does with `nn.Module.__call__`: two
    threads that did so at once would put each other's changes back."""
    with _ALONE:
        yield


@contextmanager
def state_restored(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, modules may be run. Buffers, attributes, gradients, modes and random states are put
    back."""
    with process_lock(), _put_back(modules):
        yield


@contextmanager
def weights_restored(model: nn.Module) -> Iterator[None]:
    """Inside, code may write to parameters too; takes a copy of them."""
    copies = [(weight, weight.detach().clone()) for weight in model.parameters()]
    try:
        yield
    finally:
        for weight, copy in copies:
            if not torch.equal(weight, copy):
                # Past autograd: a counted write would make graphs that hold the weight unusable.
                weight.data.copy_(copy)


@contextmanager
def _put_back(modules: Sequence[nn.Module]) -> Iterator[None]:
    parts = {part for module in modules for part in module.modules()}
    state = CodeState({str(number): part for number, part in enumerate(parts)})
    # Also tensors in plain attributes: a cache that a trial fills must not be what training reads.
    tensors = {
        id(each): each
        for part in parts
        for each in (*part._buffers.values(), *vars(part).values())
        if isinstance(each, torch.Tensor)
    }
    copies = [(tensor, tensor.detach().clone()) for tensor in tensors.values()]
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
        state.put_back()
        for part, training in modes.items():
            part.training = training
        random.setstate(drawn)
        np.random.set_state(drawn_by_numpy)
        for weight, gradient in gradients.items():
            weight.grad = gradient
        with torch.no_grad():
            for tensor, copy in copies:
                # A write would count as one by the model's code.
                if not torch.equal(tensor, copy):
                    tensor.copy_(copy)

"""What training does, as spans: forward, backward, optimizer step, waiting for data.

Hooks of PyTorch's own tell when each begins and ends. They are installed only when somebody wants
a trace. They are plain functions and not methods, because a copy of a model copies its hooks.

On a GPU these spans are the host's side: the time it took to queue the work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from farandole.data import Loader
from farandole.trace.spans import Trace

_END: Any = object()


class Watch:
    """Tells `trace` what the models and optimizers that it follows do."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        # One for all models: where one's output is another's input, they have a backward in common.
        self._backward = _Stopwatch(trace, "backward")

    def follow(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        self._follow_model(model)
        if optimizer is not None:
            self._follow_optimizer(optimizer)

    def _follow_model(self, model: nn.Module) -> None:
        forward, backward = _Stopwatch(self._trace, "forward"), self._backward

        @torch.compiler.disable  # a model that is compiled runs them beside its graph
        def before(module: nn.Module, args: Any) -> None:
            backward.stop()  # one that failed, and that the script has survived
            forward.start()

        @torch.compiler.disable
        def after(module: nn.Module, args: Any, output: Any) -> None:
            forward.stop()
            for tensor in _tensors(output):
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(first_gradient)

        def first_gradient(gradients: Any) -> None:
            if not backward.running:
                backward.start()
                # Runs when the whole backward pass is done.
                torch.autograd.Variable._execution_engine.queue_callback(queue_last)

        def queue_last() -> None:
            # What was queued meanwhile, the wait for the gradients, belongs to the backward.
            torch.autograd.Variable._execution_engine.queue_callback(backward.stop)

        model.register_forward_pre_hook(before, prepend=True)
        model.register_forward_hook(after, always_call=True)

    def _follow_optimizer(self, optimizer: Optimizer) -> None:
        step = _Stopwatch(self._trace, "optimizer step")

        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            step.start()

        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            step.stop()

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)


class WatchedLoader(Loader):
    """Tells the group's trace how long the script waits for each batch."""

    def __iter__(self) -> Iterator[Any]:
        batches = super().__iter__()
        try:
            while True:
                with self._group.trace.span("data", "data"):
                    batch = next(batches, _END)
                if batch is _END:
                    return
                yield batch
        finally:
            batches.close()  # type: ignore[attr-defined]  # it is a generator


class _Stopwatch:
    """A span between two hooks. Starting it again ends one that was left running by an error."""

    def __init__(self, trace: Trace, name: str) -> None:
        self._trace = trace
        self._name = name
        self._span: AbstractContextManager[None] | None = None

    @property
    def running(self) -> bool:
        return self._span is not None

    def start(self) -> None:
        self.stop()
        self._span = self._trace.span(self._name, "compute")
        self._span.__enter__()

    def stop(self) -> None:
        span, self._span = self._span, None
        if span is not None:
            span.__exit__(None, None, None)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Those that a model's output holds."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors(inner)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _tensors(vars(value))

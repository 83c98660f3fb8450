"""One rank's part of a collective: its tensors, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from farandole.horovod.engine.requests import Request
from farandole.trace.spans import Trace


class Work:
    """Made when a collective is asked for; whoever asked holds on to it as the handle.

    `outputs` may be `inputs` themselves: then it is done in place. Where the engine makes the
    outputs, because their shapes are known only when all ranks have spoken, they are empty.
    """

    __slots__ = (
        "_span",
        "done",
        "error",
        "inputs",
        "last_joined",
        "outputs",
        "perform",
        "ready",
        "request",
    )

    def __init__(
        self,
        request: Request,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor] | None = None,
    ) -> None:
        self.request = request
        self.inputs = inputs
        self.outputs = outputs if outputs is not None else []
        self.done = False
        self.error: Exception | None = None
        self.perform: Callable[[], None] | None = None  # what to do instead of a collective
        self.last_joined = -1
        self.ready = _moment_on_device(inputs)
        self._span: AbstractContextManager[None] | None = None

    def begin_wait(self, trace: Trace) -> None:
        """For the timeline: from when it was asked for until all ranks have."""
        kind = self.request.kind
        self._span = trace.span(f"NEGOTIATE_{kind.upper()} {self.request.name}", "wait")
        self._span.__enter__()

    def end_wait(self) -> None:
        if self._span is not None:
            self._span.__exit__(None, None, None)
            self._span = None

    def end(self, error: Exception | None = None) -> None:
        self.error = error
        self.inputs = []  # nobody needs them any more
        self.done = True


def _moment_on_device(inputs: list[torch.Tensor]) -> torch.cuda.Event | None:
    """When the numbers are there: a GPU computes them after the call that asks for it."""
    if not inputs or not inputs[0].is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(inputs[0].device))
    return event

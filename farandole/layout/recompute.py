"""Activations that are computed again in the backward pass instead of kept.

PyTorch's checkpoint does the work. What it leaves open are running statistics: BatchNorm would
count a batch twice. So its buffers are put back as they were after the second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint


def recomputed(run: Callable[[Any], Any], value: Any, module: nn.Module) -> Any:
    """`run(value)`, keeping only `value`. Random numbers must be the same when it runs again."""

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _statistics_kept(module)

    return checkpoint(
        run, value, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
    )


@contextmanager
def _statistics_kept(module: nn.Module) -> Iterator[None]:
    buffers = [
        buffer
        for norm in module.modules()
        if isinstance(norm, _NormBase)
        for buffer in norm.buffers()
    ]
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            # Past autograd: the graph that is being walked holds on to these buffers.
            buffer.data.copy_(value)

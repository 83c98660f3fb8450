"""What a forward pass changes beside the weights' gradients, where that cannot be exact.

In the plain model a step is one forward pass. With micro-batches there are several, each rank that
holds a copy of a stage has some of them, and what is recomputed runs twice. A counter, a moving
average or the power iteration of `spectral_norm` then moves at another pace than in the plain
model. BatchNorm's statistics are looked after elsewhere, and documented. Everything else is found
in a stage's first two forward passes, and refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from farandole.errors import InexactError
from farandole.layout.recording.state.code_state import CodeState

_PASSES = 2


class ForwardChanges:
    """Looks at forward passes of a stage. `layers`: the names of modules in the whole model.

    `of_buffers`, `of_attributes`: why a step changes them otherwise than the plain model does;
    nothing: it does not.
    """

    def __init__(
        self,
        part: nn.Module,
        layers: Mapping[nn.Module, str],
        *,
        of_buffers: str,
        of_attributes: str,
    ) -> None:
        self._modules = {layers[each]: each for each in part.modules() if each in layers}
        self._part = part
        self._layers = layers
        self._of_buffers = of_buffers
        self._of_attributes = of_attributes
        self._seen = 0

    def looked_for(self) -> AbstractContextManager[None]:
        """Raises `InexactError` naming what was changed inside. For the first passes only."""
        self._seen += 1
        if self._seen > _PASSES or not (self._of_buffers or self._of_attributes):
            return nullcontext()
        # What the first pass puts into an attribute may be a cache, made once.
        return self._compared(attributes=self._seen == _PASSES and bool(self._of_attributes))

    @contextmanager
    def _compared(self, *, attributes: bool) -> Iterator[None]:
        buffers = self._buffers() if self._of_buffers else []
        state = CodeState(self._modules) if attributes else None
        yield
        for part, name, buffer, version in buffers:
            # A buffer can be written to, or replaced by a new tensor; the version alone would miss
            # the second.
            if part._buffers.get(name) is not buffer or buffer._version != version:
                raise InexactError(_refusal(self._named(part, name), self._of_buffers))
        for change in state.changes() if state is not None else ():
            if change.name not in self._names_of_buffers():
                raise InexactError(_refusal(change.name, self._of_attributes))

    def _buffers(self) -> list[tuple[nn.Module, str, torch.Tensor, int]]:
        return [
            (part, name, buffer, buffer._version)
            for part in self._part.modules()
            if not isinstance(part, _NormBase)
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]

    def _names_of_buffers(self) -> set[str]:
        return {self._named(part, name) for part in self._part.modules() for name in part._buffers}

    def _named(self, part: nn.Module, name: str) -> str:
        layer = self._layers.get(part, "")
        return f"{layer}.{name}" if layer else name


def _refusal(name: str, why: str) -> str:
    return (
        f"the model's forward changes {name!r}, and {why}. So it would not be what it is in the "
        "plain model. Take microbatches=1, no replicas of stages, and recompute=false; or do it "
        "outside of forward, once a step. With run.trainer(…, check=False) it trains as it is."
    )


def reasons(*, microbatches: int, copies: bool, recomputes: bool) -> tuple[str, str]:
    """Why buffers, and why attributes, change otherwise than in the plain model."""
    if microbatches > 1:
        why = f"a step runs it {microbatches} times, once for each micro-batch"
        return why, why
    if copies:
        why = "several ranks hold this stage, and each changes its own"
        return why, why
    return "", "a recomputed stage runs it twice in each step" if recomputes else ""

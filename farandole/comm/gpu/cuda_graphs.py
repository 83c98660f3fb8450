"""CUDA graphs: what is captured runs again later, on the GPU alone, without any Python."""

from __future__ import annotations

import torch

from farandole.errors import UserError


def is_captured() -> bool:
    """Whether what is queued now becomes a part of a graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def refuse_capture(what: str) -> None:
    """For what needs Python each time. A replay would leave it out: each worker on its own would
    go on with other parameters, and nobody would notice."""
    if is_captured():
        raise UserError(
            f"a CUDA graph is being captured around {what}, and with several workers a replay "
            "would train each of them alone. Let the graph have the model only: torch.compile("
            "model, mode='reduce-overhead') or torch.cuda.make_graphed_callables, before the "
            "model is distributed. loss.backward() and optimizer.step() stay outside."
        )

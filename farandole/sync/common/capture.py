"""CUDA graphs: what is captured runs again later, on the GPU alone, without any Python."""

from __future__ import annotations

import torch
from torch import nn

from farandole.errors import UserError


def is_captured() -> bool:
    """Whether what is queued now becomes a part of a graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def refuse_graphed(model: nn.Module, what: str) -> None:
    """For what replaces layers: a graph that was captured before goes on with the old ones."""
    for name, module in model.named_modules():
        forward = vars(module).get("forward")
        if "make_graphed_callables" in getattr(forward, "__qualname__", ""):
            where = f"its part {name!r}" if name else "this model"
            raise UserError(
                f"torch.cuda.make_graphed_callables has captured {where}, and {what} replaces "
                "layers, which the graph would not notice. Leave one of the two out."
            )


def refuse_capture(what: str) -> None:
    """For what needs Python each time. A replay would leave it out: each worker on its own would
    go on with other parameters, and nobody would notice."""
    if is_captured():
        raise UserError(
            f"a CUDA graph is being captured around {what}, and with several workers a replay "
            "would train each of them alone. Let the graph have the model only: torch.compile("
            "model, mode='reduce-overhead') before run.distribute, or "
            "torch.cuda.make_graphed_callables. loss.backward() and optimizer.step() stay outside."
        )

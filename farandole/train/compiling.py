"""Says that a model will be compiled: otherwise a first step of minutes looks as if it hung."""

from __future__ import annotations

import sys

from torch import nn

NOTE = "torch.compile compiles the model in its first step, once; that may take minutes"


def is_compiled(model: nn.Module) -> bool:
    """Whether `torch.compile(model)` or `model.compile()` was called. It is not compiled yet."""
    dynamo = sys.modules.get("torch._dynamo")  # who compiles has imported it
    wrapped = dynamo is not None and isinstance(model, dynamo.OptimizedModule)
    return wrapped or any(part._compiled_call_impl is not None for part in model.modules())

"""Farandole: train a PyTorch model on many workers, by any scheme, from one script.

    import farandole as fd

    run = fd.init()
    model, opt = run.distribute(model, opt)
    for x, y in run.loader(dataset, batch_size=64): ...

Names are imported when first used, so that the command line answers without waiting for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from farandole.errors import (
        CheckpointError,
        CommError,
        FarandoleError,
        JoinError,
        LaunchError,
        ModelMismatchError,
        UserError,
    )
    from farandole.optim import LargeBatch, Lars
    from farandole.sync import AllReduce
    from farandole.topology import Topology
    from farandole.train import Run, init

_HOME = {
    "AllReduce": "farandole.sync",
    "CheckpointError": "farandole.errors",
    "CommError": "farandole.errors",
    "FarandoleError": "farandole.errors",
    "JoinError": "farandole.errors",
    "LargeBatch": "farandole.optim",
    "Lars": "farandole.optim",
    "LaunchError": "farandole.errors",
    "ModelMismatchError": "farandole.errors",
    "Run": "farandole.train",
    "Topology": "farandole.topology",
    "UserError": "farandole.errors",
    "init": "farandole.train",
}

__all__ = [
    "AllReduce",
    "CheckpointError",
    "CommError",
    "FarandoleError",
    "JoinError",
    "LargeBatch",
    "Lars",
    "LaunchError",
    "ModelMismatchError",
    "Run",
    "Topology",
    "UserError",
    "init",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'farandole' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])

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
    from farandole import data, server
    from farandole.comm import Group
    from farandole.data.tile_source import TileSource
    from farandole.errors import (
        CheckpointError,
        CommError,
        DivergedError,
        FarandoleError,
        InexactError,
        JoinError,
        LaunchError,
        ModelMismatchError,
        StageError,
        UserError,
    )
    from farandole.layout import Layout
    from farandole.optim import LargeBatch, Lars
    from farandole.sync import (
        AdaComm,
        AllReduce,
        Daso,
        DiLoCo,
        Downpour,
        Federated,
        Hogwild,
        Lagged,
        Local,
        PostLocal,
        Server,
        Strategy,
    )
    from farandole.topology import Topology
    from farandole.train import Run, current, init
    from farandole.train.checkpoint.automatic.policy import Checkpoints
    from farandole.train.trainer import Trainer

_HOME = {
    "AdaComm": "farandole.sync",
    "AllReduce": "farandole.sync",
    "CheckpointError": "farandole.errors",
    "Checkpoints": "farandole.train.checkpoint.automatic.policy",
    "CommError": "farandole.errors",
    "Daso": "farandole.sync",
    "DiLoCo": "farandole.sync",
    "DivergedError": "farandole.errors",
    "Downpour": "farandole.sync",
    "FarandoleError": "farandole.errors",
    "Federated": "farandole.sync",
    "Group": "farandole.comm",
    "Hogwild": "farandole.sync",
    "InexactError": "farandole.errors",
    "JoinError": "farandole.errors",
    "Lagged": "farandole.sync",
    "LargeBatch": "farandole.optim",
    "Lars": "farandole.optim",
    "LaunchError": "farandole.errors",
    "Layout": "farandole.layout",
    "Local": "farandole.sync",
    "ModelMismatchError": "farandole.errors",
    "PostLocal": "farandole.sync",
    "Run": "farandole.train",
    "Server": "farandole.sync",
    "StageError": "farandole.errors",
    "Strategy": "farandole.sync",
    "TileSource": "farandole.data.tile_source",
    "Topology": "farandole.topology",
    "Trainer": "farandole.train.trainer",
    "UserError": "farandole.errors",
    "current": "farandole.train",
    "init": "farandole.train",
}

__all__ = [
    "AdaComm",
    "AllReduce",
    "CheckpointError",
    "Checkpoints",
    "CommError",
    "Daso",
    "DiLoCo",
    "DivergedError",
    "Downpour",
    "FarandoleError",
    "Federated",
    "Group",
    "Hogwild",
    "InexactError",
    "JoinError",
    "Lagged",
    "LargeBatch",
    "Lars",
    "LaunchError",
    "Layout",
    "Local",
    "ModelMismatchError",
    "PostLocal",
    "Run",
    "Server",
    "StageError",
    "Strategy",
    "TileSource",
    "Topology",
    "Trainer",
    "UserError",
    "current",
    "data",
    "init",
    "server",
]


def __getattr__(name: str) -> Any:
    if name in ("cray", "data", "jax", "keras", "learn", "server"):
        return importlib.import_module(f"farandole.{name}")
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    else:  # a strategy that nobody has listed above: its registry knows it
        value = importlib.import_module("farandole.sync.registry").STRATEGIES.home_of(name)
    if value is None:
        raise AttributeError(f"module 'farandole' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])

"""`hvd.elastic`: training that goes on when workers die, and when hosts come and go.

state = hvd.elastic.TorchState(model, optimizer, epoch=0)

@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, 90):
        …
        state.commit()
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import torch

from farandole.errors import JoinError
from farandole.horovod.common.elastic import ObjectState as _ObjectState
from farandole.horovod.common.elastic import State, run_fn
from farandole.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from farandole.horovod.torch.elastic.sampler import ElasticSampler
from farandole.horovod.torch.elastic.state import TorchState
from farandole.horovod.torch.functions import broadcast_object
from farandole.horovod.torch.mpi_ops import allgather, init, rank, shutdown
from farandole.worker import elastic as rejoining

__all__ = [
    "ElasticSampler",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "run",
]

Result = TypeVar("Result")


class ObjectState(_ObjectState):
    """Any values by name, as attributes: `ObjectState(epoch=0, batch=0)`."""

    def __init__(self, **kwargs: object) -> None:
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **kwargs)


def run(func: Callable[..., Result]) -> Callable[..., Result]:
    """Runs `func(state, …)` again, from the state's last commit, whenever the workers change.

    A worker that has no part in it any more, because its host was removed, ends in it with 0.
    """
    return run_fn(func, _reset, _anyone)


def _reset() -> None:
    while True:
        shutdown()
        try:
            init()
            return
        except rejoining.LauncherLostError:
            raise
        except (JoinError, HorovodInternalError):
            # Another worker died between getting its rank and joining the group. Under a launcher
            # that replaces it there is a next generation.
            if not rejoining.is_elastic(os.environ):
                raise


def _anyone(wanted: bool) -> bool:
    return bool(allgather(torch.tensor([int(wanted)]), name="elastic.anyone").any())

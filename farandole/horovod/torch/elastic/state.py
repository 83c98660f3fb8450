"""The state of a PyTorch training: models, optimizers and samplers, and plain values beside them.

Each of the former has a handler that knows how to copy it in memory, go back to the copy, and give
everyone rank 0's. Copies of tensors stay on their device.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Final, Generic, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from farandole.horovod.common.elastic import ObjectState
from farandole.horovod.torch.elastic.sampler import ElasticSampler
from farandole.horovod.torch.functions import (
    broadcast_object,
    broadcast_object_fn,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from farandole.horovod.torch.mpi_ops import allgather, rank

Value = TypeVar("Value")


class StateHandler(Generic[Value]):
    """How one value of the state is saved, restored and sent around."""

    def __init__(self, value: Value) -> None:
        self.value = value

    def save(self) -> None:
        raise NotImplementedError

    def restore(self) -> None:
        raise NotImplementedError

    def sync(self) -> None:
        raise NotImplementedError

    def share(self) -> None:
        """Before a commit, on all ranks: lets the others know what only this worker knows."""

    def set_value(self, value: Value) -> None:
        self.value = value
        self.save()


class ModelStateHandler(StateHandler[nn.Module]):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(self._saved)

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(StateHandler[Optimizer]):
    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        # A copy: an optimizer keeps the tensors that it is given, and writes to them.
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(StateHandler[ElasticSampler]):
    """What one worker has seen the others must know before it dies, hence `share`."""

    def __init__(self, sampler: ElasticSampler) -> None:
        super().__init__(sampler)
        self.save()

    def save(self) -> None:
        self._saved = self.value.state_dict()

    def restore(self) -> None:
        self.value.load_state_dict(self._saved)

    def share(self) -> None:
        news = torch.tensor(self.value.take_news(), dtype=torch.int64)
        self.value.processed_indices.update(allgather(news, name="elastic.sampler").tolist())

    def sync(self) -> None:
        self.share()
        from_rank_0 = broadcast_object_fn(root_rank=0)
        self.value.load_state_dict(from_rank_0(self.value.state_dict()))
        self.save()


_REGISTRY: Final[list[tuple[type, type[StateHandler[Any]]]]] = [
    (nn.Module, ModelStateHandler),
    (Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler[Any]]]]:
    """Which handler takes values of which class; the first that fits does."""
    return list(_REGISTRY)


def set_handler_registry(registry: Sequence[tuple[type, type[StateHandler[Any]]]]) -> None:
    """For all states that are made from now on."""
    _REGISTRY[:] = registry


class TorchState(ObjectState):
    """`TorchState(model, optimizer, epoch=0, …)`: models, optimizers and samplers, under whatever
    name, and plain values. All are attributes, and what is assigned to one is part of the state.
    """

    def __init__(
        self, model: nn.Module | None = None, optimizer: Optimizer | None = None, **kwargs: Any
    ) -> None:
        given = {"model": model, "optimizer": optimizer, **kwargs}
        handlers = {}
        for name, value in given.items():
            for kind, handler in _REGISTRY:
                if isinstance(value, kind):
                    handlers[name] = handler(value)
                    break
        self._handlers: dict[str, StateHandler[Any]] = handlers
        for name, found in handlers.items():
            super().__setattr__(name, found.value)
        rest = {name: value for name, value in given.items() if name not in handlers}
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **rest)

    def commit(self) -> None:
        for handler in self._handlers.values():
            handler.share()
        super().commit()

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def regroup(self) -> None:
        for handler in self._handlers.values():
            if isinstance(handler, SamplerStateHandler):
                handler.sync()
        super().regroup()

    def __setattr__(self, name: str, value: Any) -> None:
        handlers: dict[str, StateHandler[Any]] = self.__dict__.get("_handlers", {})
        if name in handlers:
            handlers[name].set_value(value)
        super().__setattr__(name, value)

"""A module that holds copies of another framework's weights, and computes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from farandole.errors import UserError


class MirrorModel(nn.Module):
    """`trained` are parameters, `frozen` are buffers, and `statistics` are those of normalising
    layers, which strategies average with the parameters."""

    def __init__(
        self,
        trained: Mapping[str, torch.Tensor],
        frozen: Mapping[str, torch.Tensor],
        statistics: Mapping[str, torch.Tensor],
    ) -> None:
        super().__init__()
        _require_distinct([*trained, *frozen, *statistics])
        for name, value in trained.items():
            self.register_parameter(_plain(name), nn.Parameter(_copy(value)))
        for name, value in frozen.items():
            self.register_buffer(_plain(name), _copy(value))
        for name, value in statistics.items():
            self.add_module(_plain(name), _Statistic(_copy(value)))

    def values(self) -> list[torch.Tensor]:
        """All of them, in the order in which they were given."""
        statistics = [part.running_mean for part in self.children() if isinstance(part, _Statistic)]
        own = [*self.parameters(recurse=False), *self.buffers(recurse=False)]
        return [value for value in (*own, *statistics) if value is not None]


class _Statistic(nn.BatchNorm1d):
    """One tensor of statistics: strategies know it by the class of the layer that holds it."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__(0, affine=False)
        self.running_mean = value
        self.running_var = self.num_batches_tracked = None

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        """Without the counter that a BatchNorm adds to states of before it had one."""
        nn.Module._load_from_state_dict(self, *args, **options)


def _plain(name: str) -> str:
    """Modules separate names by dots, and theirs may have some."""
    return name.replace(".", ":")


def _copy(value: torch.Tensor) -> torch.Tensor:
    return value.detach().clone(memory_format=torch.contiguous_format)


def _require_distinct(names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in map(_plain, names):
        if name in seen:
            raise UserError(f"two weights are called {name!r}: give them different names.")
        if hasattr(nn.Module, name):
            raise UserError(f"a weight cannot be called {name!r}: give it another name.")
        seen.add(name)

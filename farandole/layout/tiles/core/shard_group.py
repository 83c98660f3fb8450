"""How shards reach each other: all in this process, or one on each rank of a tile group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import count

import torch

from farandole.comm.p2p.mail import Mail
from farandole.layout.tiles.core.grid import Grid

_FORWARD, _BACKWARD = 3, 4  # the first number of a label; a pipeline's own messages have 0 to 2


class ShardGroup(ABC):
    """A grid of shards, of which some are computed here."""

    def __init__(self, grid: Grid, mine: Sequence[int]) -> None:
        self.grid = grid
        self.mine = tuple(mine)
        self._numbers = count()

    @property
    def all_here(self) -> bool:
        return len(self.mine) == self.grid.shards

    def next(self) -> int:
        """A number for an exchange. Shards do the same in the same order, and so agree on it."""
        # A backward uses the number of its forward. So a gradient finds its exchange even where
        # autograd visits the nodes in another order than the forward made them.
        return next(self._numbers)

    def expect(self, shard: int) -> None:  # noqa: B027 (where nothing travels, nothing is to do)
        """Lets the next message of a shard that is not here come while this one computes."""

    @abstractmethod
    def post(self, shard: int, number: int, back: bool, tensors: Sequence[torch.Tensor]) -> None:
        """Sends tensors to a shard that is not here. `back`: they are gradients of what came."""

    @abstractmethod
    def take(self, shard: int, number: int, back: bool) -> list[torch.Tensor]:
        """Waits for what was posted there."""


class LocalShards(ShardGroup):
    """All shards here, one after the other: the tiles are visited in turn."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid, range(grid.shards))

    def post(self, shard: int, number: int, back: bool, tensors: Sequence[torch.Tensor]) -> None:
        raise AssertionError("all shards are here")

    def take(self, shard: int, number: int, back: bool) -> list[torch.Tensor]:
        raise AssertionError("all shards are here")


class MailShards(ShardGroup):
    """One shard here, the others on other ranks; `ranks` are those of all shards, in order."""

    def __init__(self, grid: Grid, shard: int, mail: Mail, ranks: Sequence[int]) -> None:
        super().__init__(grid, [shard])
        self._mail = mail
        self._ranks = ranks

    def post(self, shard: int, number: int, back: bool, tensors: Sequence[torch.Tensor]) -> None:
        kind = _BACKWARD if back else _FORWARD
        value = [tensor.detach() for tensor in tensors]
        self._mail.post(self._ranks[shard], (kind, number, 0, 0), value)

    def expect(self, shard: int) -> None:
        self._mail.expect(self._ranks[shard])

    def take(self, shard: int, number: int, back: bool) -> list[torch.Tensor]:
        kind = _BACKWARD if back else _FORWARD
        result: list[torch.Tensor] = self._mail.fetch(self._ranks[shard], (kind, number, 0, 0))
        return result

"""How lanes reach each other: all in this process, or one on each rank of a team."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import count

import torch

from farandole.comm.p2p.mail import Mail
from farandole.layout.tiles.core.grid import Grid

_FORWARD, _BACKWARD = 3, 4  # the first number of a label; a pipeline's own messages have 0 to 2


class Lanes(ABC):
    """A grid of lanes, of which some are computed here."""

    def __init__(self, grid: Grid, mine: Sequence[int]) -> None:
        self.grid = grid
        self.mine = tuple(mine)
        self._numbers = count()

    @property
    def all_here(self) -> bool:
        return len(self.mine) == self.grid.lanes

    def next(self) -> int:
        """A number for an exchange. Lanes do the same in the same order, and so agree on it."""
        return next(self._numbers)

    def expect(self, lane: int) -> None:  # noqa: B027 (where nothing travels, nothing is to do)
        """Lets the next message of a lane that is not here come while this one computes."""

    @abstractmethod
    def post(self, lane: int, number: int, back: bool, tensors: Sequence[torch.Tensor]) -> None:
        """Sends tensors to a lane that is not here. `back`: they are gradients of what came."""

    @abstractmethod
    def take(self, lane: int, number: int, back: bool) -> list[torch.Tensor]:
        """Waits for what was posted there."""


class LocalLanes(Lanes):
    """All lanes here, one after the other: the tiles are visited in turn."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid, range(grid.lanes))

    def post(self, lane: int, number: int, back: bool, tensors: Sequence[torch.Tensor]) -> None:
        raise AssertionError("all lanes are here")

    def take(self, lane: int, number: int, back: bool) -> list[torch.Tensor]:
        raise AssertionError("all lanes are here")


class MailLanes(Lanes):
    """One lane here, the others on other ranks; `ranks` are those of all lanes, in order."""

    def __init__(self, grid: Grid, lane: int, mail: Mail, ranks: Sequence[int]) -> None:
        super().__init__(grid, [lane])
        self._mail = mail
        self._ranks = ranks

    def post(self, lane: int, number: int, back: bool, tensors: Sequence[torch.Tensor]) -> None:
        kind = _BACKWARD if back else _FORWARD
        value = [tensor.detach() for tensor in tensors]
        self._mail.post(self._ranks[lane], (kind, number, 0, 0), value)

    def expect(self, lane: int) -> None:
        self._mail.expect(self._ranks[lane])

    def take(self, lane: int, number: int, back: bool) -> list[torch.Tensor]:
        kind = _BACKWARD if back else _FORWARD
        result: list[torch.Tensor] = self._mail.fetch(self._ranks[lane], (kind, number, 0, 0))
        return result

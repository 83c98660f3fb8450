"""A team: the gradients of one model, averaged apart from those of others.

In the pipelined mode a step applies the averages of the step before, while its own travel:

    step        0   1   2      3      4      5   6
    mode        synchronous    lagged            synchronous
    applied     g0  g1  –      g2     g3     g4+g5  g6          every gradient once
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from farandole.comm import Group, Handle
from farandole.comm.tensors import batches
from farandole.errors import UserError


@dataclass
class TeamOptions:
    """`synchronous_first`: so many steps are not lagged; None: none is. Nor are those from the step
    `synchronous_from` on. Every `print_every` steps the statistics are printed; 0: never."""

    synchronous_first: int | None = None
    synchronous_from: int | None = None
    print_every: int = 0

    def __post_init__(self) -> None:
        for name in ("synchronous_first", "synchronous_from", "print_every"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise UserError(f"config_team: {name}={value} must be 0 or more.")


@dataclass(frozen=True)
class TeamStatistics:
    """Since the team was made, on this rank."""

    steps: int
    seconds: float  # from the first call to now
    waited_seconds: float  # in collectives
    bytes: int  # of gradients that were averaged


class Team:
    """All ranks call every method together."""

    def __init__(self, number: int, group: Group) -> None:
        self.number = number
        self.group = group
        self.options = TeamOptions()
        self._steps = 0
        self._began: float | None = None
        self._waited = 0.0
        self._bytes = 0
        self._travelling: list[tuple[torch.Tensor, Handle[torch.Tensor]]] | None = None

    def average(self, gradients: Sequence[torch.Tensor]) -> None:
        """Overwrites the gradients with the averages to apply in this step."""
        begin = time.perf_counter()
        self._began = begin if self._began is None else self._began
        lagged = self._is_lagged()
        arrived = self._arrived()
        flats = [torch.cat([g.detach().reshape(-1) for g in b]) for b in batches(gradients)]
        if lagged:
            start = self.group.start
            self._travelling = [
                (flat, start(self.group.all_reduce, flat, "average")) for flat in flats
            ]
            applied = arrived or [torch.zeros_like(flat) for flat in flats]
        else:
            applied = [self.group.all_reduce(flat, "average") for flat in flats]
            for flat, late in zip(applied, arrived or [], strict=bool(arrived)):
                flat.add_(late)
        self._write(gradients, applied)
        self._steps += 1
        self._bytes += sum(flat.nbytes for flat in flats)
        self._waited += time.perf_counter() - begin

    @property
    def is_due(self) -> bool:
        """Whether the statistics are to be printed."""
        every = self.options.print_every
        return bool(every) and self._steps > 0 and self._steps % every == 0

    @property
    def statistics(self) -> TeamStatistics:
        seconds = 0.0 if self._began is None else time.perf_counter() - self._began
        return TeamStatistics(self._steps, seconds, self._waited, self._bytes)

    def require_applied(self) -> None:
        """Raises if the last gradients have been averaged and not been applied."""
        if self._travelling is not None:
            self._arrived()
            raise UserError(
                f"team {self.number}: the averages of the last step were not applied, since it was "
                "pipelined. End with synchronous steps: config_team(…, max_steps=…)."
            )

    def _is_lagged(self) -> bool:
        first, end = self.options.synchronous_first, self.options.synchronous_from
        if first is None or self._steps < first:
            return False
        return end is None or self._steps < end

    def _arrived(self) -> list[torch.Tensor] | None:
        travelling, self._travelling = self._travelling, None
        if travelling is None:
            return None
        return [handle.wait() for _, handle in travelling]

    @torch.no_grad()
    def _write(self, gradients: Sequence[torch.Tensor], flats: Sequence[torch.Tensor]) -> None:
        for batch, flat in zip(batches(gradients), flats, strict=True):
            if flat.numel() != sum(gradient.numel() for gradient in batch):
                raise UserError(
                    f"team {self.number}: the gradients are not those of the step before: "
                    f"{sum(g.numel() for g in batch)} numbers instead of {flat.numel()}. A team is "
                    "for one model."
                )
            pieces = flat.split([gradient.numel() for gradient in batch])
            for gradient, piece in zip(batch, pieces, strict=True):
                gradient.copy_(piece.view_as(gradient))

"""Numbers whose sum over all ranks is known, so that every result can be checked.

Small whole numbers add up exactly, in any order and in every dtype: a result is right to the bit
or wrong. Thirds of them do not: their sum depends on the order of additions, and ranks that added
in different orders show it. Both repeat with a prime period, so that a block that landed in the
wrong place (blocks begin at round numbers) is noticed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

PERIOD = 1021
_LARGEST_SUM = 127  # the largest int8; half precision is exact beyond it


class Pattern:
    """One rank's numbers, and what all ranks' sum must be."""

    def __init__(
        self,
        rank: int,
        size: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
        *,
        thirds: bool = False,
    ) -> None:
        ranks, places = torch.arange(size).unsqueeze(1), torch.arange(PERIOD)
        top = max(1, _LARGEST_SUM // size)
        numbers = (ranks + 1) * (places + 1) ** 2 % PERIOD % (top + 1)
        numbers *= (ranks + places) % size < _LARGEST_SUM  # only that many ranks can give a 1
        rounds = thirds and dtype.is_floating_point
        contributions = (numbers / 3 if rounds else numbers).to(dtype)
        self._mine = contributions[rank].to(device)
        self._total = contributions.double().sum(0).to(device)
        # Each of the additions rounds a partial sum, which is no larger than the total.
        self._margin = self._total * (size * torch.finfo(dtype).eps if rounds else 0.0)

    def fill(self, tensor: torch.Tensor) -> None:
        for part in _periods(tensor):
            part.copy_(self._mine[: part.shape[-1]])

    def is_sum(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` holds the sum of what all ranks filled in."""
        if not self._margin.any():
            exact = self._total.to(tensor.dtype)
            return all(bool((part == exact[: part.shape[-1]]).all()) for part in _periods(tensor))
        low, high = self._total - self._margin, self._total + self._margin
        return all(
            bool(((part >= low[: part.shape[-1]]) & (part <= high[: part.shape[-1]])).all())
            for part in _periods(tensor)
        )


def _periods(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The whole periods as rows, then what is left."""
    whole = tensor.numel() // PERIOD * PERIOD
    yield tensor[:whole].view(-1, PERIOD)
    yield tensor[whole:]

"""In which order an epoch visits a dataset: the same on every rank, and on any number of ranks."""

from __future__ import annotations

from typing import cast

import torch
from torch.utils.data import Sampler

from farandole.comm import Group
from farandole.errors import UserError


def shuffled(count: int, seed: int, epoch: int) -> list[int]:
    """A permutation that depends on nothing but its arguments."""
    generator = torch.Generator().manual_seed(mixed(seed, epoch))
    return cast(list[int], torch.randperm(count, generator=generator).tolist())


def mixed(seed: int, *others: int) -> int:
    """One seed out of several numbers; (0, 1) and (1, 0) give different ones."""
    for other in others:
        seed = (seed * 1_000_003 + other) % 2**63
    return seed


def from_sampler(sampler: Sampler[int], group: Group, epoch: int) -> list[int]:
    """One epoch of the user's own sampler, as rank 0 draws it.

    A sampler may draw from a generator that differs between ranks, so its word counts only once.
    """
    set_epoch = getattr(sampler, "set_epoch", None)  # as many samplers have
    if set_epoch is not None:
        set_epoch(epoch)
    drawn = list(sampler) if group.rank == 0 else []
    length = int(group.broadcast(torch.tensor([len(drawn)])))
    order = (
        torch.tensor(drawn, dtype=torch.int64) if group.rank == 0 else torch.zeros(length).long()
    )
    return cast(list[int], group.broadcast(order).tolist())


def sampler_length(sampler: Sampler[int]) -> int:
    try:
        return len(sampler)  # type: ignore[arg-type]
    except TypeError:
        raise UserError(
            f"the sampler {type(sampler).__name__} has no length, so its epoch cannot be shared. "
            "Give it a __len__ that says how many samples it draws."
        ) from None

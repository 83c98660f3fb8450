"""How much memory of its GPU each rank has used at its peak."""

from __future__ import annotations

import torch

from farandole.comm import Group


def peak_bytes(device: torch.device) -> int | None:
    """What the tensors of this process took at most so far; None where there is no GPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def gather_peaks(group: Group, device: torch.device) -> list[int] | None:
    """*Together.* The peak of every rank, by rank; None without GPUs, and then nothing is sent."""
    peak = peak_bytes(device)
    return None if peak is None else gather_bytes(group, peak)


def gather_bytes(group: Group, mine: int) -> list[int]:
    """*Together.* The number of every rank, by rank.

    A sum of vectors in which each rank fills its own place: where the group goes on without dead
    ranks, theirs is 0.
    """
    found = torch.zeros(group.size, dtype=torch.float64)
    found[group.rank] = float(mine)
    return [int(each) for each in group.all_reduce(found).tolist()]

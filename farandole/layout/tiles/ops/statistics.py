"""Means and variances that shards have found of their own parts, combined to those of all parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def combined(
    parts: Sequence[torch.Tensor], places: Sequence[Any], shape: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean and the variance over all parts, as tensors of `shape`.

    A part is a stack of counts, means and squared deviations. `places` are the indices in the
    result that each part belongs to.
    """
    # As Chan et al. do. Sums and sums of squares would be simpler, but their difference cancels
    # where the mean is large. Parts are added in the order of the shards, so all shards that share
    # a statistic get the same bits.
    if all(part.shape[1:] == tuple(shape) for part in parts):  # each of all of the result
        counts, means, deviations = torch.stack(list(parts)).unbind(1)
        values = counts.sum(0)
        mean = (counts * means).sum(0) / values
        apart = means - mean
        return mean, (deviations + counts * apart * apart).sum(0) / values
    counts, sums, deviation = parts[0].new_zeros(3, *shape).unbind(0)
    for (count, mean_of, _), at in zip(parts, places, strict=True):
        counts[at] += count
        sums[at] += count * mean_of
    mean = sums / counts
    for (count, mean_of, deviation_of), at in zip(parts, places, strict=True):
        apart = mean_of - mean[at]
        deviation[at] += deviation_of + count * apart * apart
    return mean, deviation / counts


def mean_and_variance(own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every channel of a tensor, which has values in each of them."""
    if own.device.type == "cpu":  # four times as fast there as what follows, with the same result
        mean, variance = torch.batch_norm_update_stats(own, None, None, 0.0)
        return mean, variance
    dims = [dim for dim in range(own.dim()) if dim != 1]
    variance, mean = torch.var_mean(own, dims, correction=0)
    return mean, variance


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a precision that many values can be added up in."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor

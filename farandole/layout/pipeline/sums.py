"""Sums over a group of ranks, of many tensors in few messages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from farandole.comm import Group
from farandole.comm.tensors import batches


def sum_over(group: Group, tensors: Sequence[torch.Tensor]) -> None:
    """Adds up tensors over a group, in place."""
    for batch in batches(tensors):
        # One message for many small tensors. All ranks form the same batches, since they have the
        # same tensors in the same order.
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in batch])
        group.all_reduce(flat)
        pieces = flat.split([tensor.numel() for tensor in batch])
        for tensor, piece in zip(batch, pieces, strict=True):
            tensor.detach().copy_(piece.view_as(tensor))

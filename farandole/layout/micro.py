"""A batch cut into micro-batches: as even as possible, and each weighed by its share."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree

from farandole.errors import UserError
from farandole.schedule import piece


class Micro(NamedTuple):
    """A part of a batch; its loss counts `weight` times."""

    inputs: Any
    targets: Any
    rows: int
    weight: float


def cut_batch(inputs: Any, targets: Any, count: int, reduction: str) -> list[Micro]:
    """At most `count` micro-batches: none is empty, so a small batch has fewer.

    The loss of a batch is the mean (or the sum) over its samples, so that of a micro-batch counts
    by its share of them. Whatever has no rows, such as a number, goes to all.
    """
    rows = batch_rows(inputs, targets)
    count = max(1, min(count, rows))
    micros = []
    for index in range(count):
        part = piece(index, count, rows)
        share = len(part) / rows if rows and reduction == "mean" else 1.0
        micros.append(
            Micro(_rows(inputs, part, rows), _rows(targets, part, rows), len(part), share)
        )
    return micros


def batch_rows(*trees: Any) -> int:
    """How many samples there are. Raises `UserError` when tensors disagree about it."""
    shapes = [
        leaf.shape
        for leaf in pytree.tree_leaves(trees)
        if isinstance(leaf, torch.Tensor) and leaf.dim()
    ]
    if not shapes:
        raise UserError("a batch needs at least one tensor with rows: its samples.")
    counts = {shape[0] for shape in shapes}
    if len(counts) > 1:
        raise UserError(
            f"a batch is cut into micro-batches by rows, and its tensors have {sorted(counts)} of "
            "them. Give all the same number of rows."
        )
    return counts.pop()


def _rows(tree: Any, part: range, rows: int) -> Any:
    if len(part) == rows:
        return tree

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return leaf[part.start : part.stop]
        return leaf

    return pytree.tree_map(cut, tree)

"""A batch cut into micro-batches: as even as possible, and each weighed by its share."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree

from farandole.errors import UserError
from farandole.layout.objective import LossWeight
from farandole.schedule import piece


class Micro(NamedTuple):
    """A part of a batch; its loss counts `weight` times."""

    inputs: Any
    targets: Any
    rows: int
    weight: float


def cut_batch(
    inputs: Any, targets: Any, count: int, reduction: str, weigh: LossWeight | None = None
) -> list[Micro]:
    """At most `count` micro-batches: none is empty, so a small batch has fewer.

    The loss of a batch is the mean (or the sum) over its samples, so that of a micro-batch counts
    by its share of them, or of what `weigh` says of all. One that counts for nothing is left out.
    Whatever has no rows, such as a number, goes to all.
    """
    rows = batch_rows(inputs, targets)
    count = max(1, min(count, rows))
    micros = []
    for index in range(count):
        part = piece(index, count, rows)
        # Micro-batches differ by one sample at most, but they do differ: equal weights would be
        # wrong for a batch that they do not divide.
        share = len(part) / rows if rows and reduction == "mean" else 1.0
        micros.append(
            Micro(_rows(inputs, part, rows), _rows(targets, part, rows), len(part), share)
        )
    return micros if weigh is None or reduction != "mean" else _weighed(micros, weigh)


def _weighed(micros: list[Micro], weigh: LossWeight) -> list[Micro]:
    weights = [float(weigh(micro.inputs, micro.targets)) for micro in micros]
    total = sum(weights)
    if not all(0 <= weight < math.inf for weight in weights) or not total > 0:
        raise UserError(
            f"loss_weight gave {weights} for the micro-batches of a batch. It must be at least 0 "
            "for each, and more than 0 for one of them: what a mean is divided by."
        )
    return [
        micro._replace(weight=weight / total)
        for micro, weight in zip(micros, weights, strict=True)
        if weight
    ]


def batch_rows(*trees: Any) -> int:
    """How many samples there are. Raises `UserError` when tensors disagree about it."""
    rows = {
        pytree.keystr(path): leaf.shape[0]
        for path, leaf in pytree.tree_flatten_with_path(trees)[0]
        if isinstance(leaf, torch.Tensor) and leaf.dim()
    }
    if not rows:
        raise UserError("a batch needs at least one tensor with rows: its samples.")
    if len(set(rows.values())) > 1:
        counts = ", ".join(f"{count} in {_called(path)}" for path, count in rows.items())
        raise UserError(
            f"a batch is cut into micro-batches by rows, and its tensors have {counts}. Give "
            "all the same number of rows; a tensor that belongs to all samples needs one copy for "
            "each."
        )
    return next(iter(rows.values()))


def first_rows(tree: Any, count: int, rows: int) -> Any:
    """The first `count` samples of a batch of `rows`."""
    return _rows(tree, range(count), rows)


def _called(path: str) -> str:
    """`inputs['mask']`, of the trees of a batch."""
    number, inner = path[1:].split("]", 1)
    return ("inputs", "targets")[int(number)] + inner


def _rows(tree: Any, part: range, rows: int) -> Any:
    if len(part) == rows:
        return tree

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return leaf[part.start : part.stop]
        return leaf

    return pytree.tree_map(cut, tree)

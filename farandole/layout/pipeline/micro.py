"""A batch cut into micro-batches: as even as possible, and each weighed by its share."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    parts = [piece(index, count, rows) for index in range(count)]
    micros = [
        # Micro-batches differ by one sample at most, but they do differ: equal weights would be
        # wrong for a batch that they do not divide.
        Micro(x, y, len(part), len(part) / rows if rows and reduction == "mean" else 1.0)
        for part, x, y in zip(
            parts, _rows(inputs, parts, rows), _rows(targets, parts, rows), strict=True
        )
    ]
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
    counted: set[int] = {leaf.shape[0] for leaf in pytree.tree_leaves(trees) if _has_rows(leaf)}
    if not counted:
        raise UserError("a batch needs at least one tensor with rows: its samples.")
    if len(counted) > 1:
        counts = ", ".join(
            f"{leaf.shape[0]} in {_called(pytree.keystr(path))}"
            for path, leaf in pytree.tree_flatten_with_path(trees)[0]
            if _has_rows(leaf)
        )
        raise UserError(
            f"a batch is cut into micro-batches by rows, and its tensors have {counts}. Give "
            "all the same number of rows; a tensor that belongs to all samples needs one copy for "
            "each."
        )
    return counted.pop()


def first_rows(tree: Any, count: int, rows: int) -> Any:
    """The first `count` samples of a batch of `rows`."""
    return _rows(tree, [range(count)], rows)[0]


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _called(path: str) -> str:
    """`inputs['mask']`, of the trees of a batch."""
    number, inner = path[1:].split("]", 1)
    return ("inputs", "targets")[int(number)] + inner


def _rows(tree: Any, parts: Sequence[range], rows: int) -> list[Any]:
    """Parts of a batch of `rows` samples."""
    if len(parts) == 1 and len(parts[0]) == rows:
        return [tree]
    # Taken apart once for all parts: that takes longer than to cut a tensor.
    leaves, spec = pytree.tree_flatten(tree)
    cut = (
        [leaf[part.start : part.stop] if _has_rows(leaf) else leaf for leaf in leaves]
        for part in parts
    )
    if spec.is_leaf():
        return [leaf for (leaf,) in cut]
    return [pytree.tree_unflatten(each, spec) for each in cut]

"""Grows a tree from its root: each pass over the data gives the histograms of all open nodes.

The size of the histograms is bounded: if there are too many open nodes for one pass, some wait for
the next. What a pass looks at depends on the tree alone, not on the number of workers.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from farandole.learn.linear.moments import Array
from farandole.learn.pools.base import Placed
from farandole.learn.tree.bins import Bins
from farandole.learn.tree.histogram import Frontier, HistogramSum
from farandole.learn.tree.impurity import Impurity, weight_of
from farandole.learn.tree.tree import LEAF, Routes, Tree

_HISTOGRAM_BYTES = 64 << 20  # of all open nodes of a pass


@dataclass(frozen=True)
class Limits:
    """When a node is not split."""

    depth: int | None
    split_rows: int
    leaf_rows: int
    decrease: float


@dataclass
class _Node:
    depth: int
    sums: Array  # one cell of a histogram: rows, and the sums of the targets
    feature: int = LEAF
    threshold: float = float(LEAF)
    left: int = -1
    right: int = -1


class _Split(NamedTuple):
    feature: int
    threshold: float
    left: Array
    right: Array


class Grower:
    """Of one tree."""

    def __init__(
        self, placed: Placed, bins: Bins, classes: int, impurity: Impurity, limits: Limits
    ) -> None:
        self._placed = placed
        self._job = HistogramSum(bins, classes)
        self._impurity = impurity
        self._limits = limits
        self._nodes: list[_Node] = []

    def grow(self) -> Tree:
        self._nodes = [_Node(0, np.zeros(self._job.depth))]
        columns, bins = self._placed.source.columns, self._job.bins.most
        capacity = max(1, _HISTOGRAM_BYTES // (8 * columns * bins * self._job.depth))
        waiting = deque([0])
        while waiting:
            batch = [waiting.popleft() for _ in range(min(capacity, len(waiting)))]
            histograms = self._histograms(batch)
            if batch[0] == 0:
                self._nodes[0].sums = histograms[0, 0].sum(axis=0)
            for place, histogram in zip(batch, histograms, strict=True):
                waiting.extend(self._split(place, histogram))
        return self._tree()

    def _histograms(self, batch: list[int]) -> Array:
        slots = np.full(len(self._nodes), -1)
        slots[batch] = np.arange(len(batch))
        found: Array = self._placed.sum(self._job, Frontier(self._routes(), slots, len(batch)))
        return found

    def _split(self, place: int, histogram: Array) -> list[int]:
        """The new nodes that may be split in turn."""
        node = self._nodes[place]
        split = self._best(node, histogram) if self._may_split(node) else None
        if split is None:
            return []
        node.feature, node.threshold = split.feature, split.threshold
        node.left, node.right = len(self._nodes), len(self._nodes) + 1
        children = [_Node(node.depth + 1, sums) for sums in (split.left, split.right)]
        self._nodes += children
        places = (node.left, node.right)
        return [at for at, child in zip(places, children, strict=True) if self._may_split(child)]

    def _may_split(self, node: _Node) -> bool:
        limits, rows = self._limits, node.sums[0]
        if limits.depth is not None and node.depth >= limits.depth:
            return False
        if rows < max(limits.split_rows, 2 * limits.leaf_rows):
            return False
        return bool(self._impurity(node.sums[1:]) > np.finfo(float).eps)

    def _best(self, node: _Node, histogram: Array) -> _Split | None:
        """As in scikit-learn, also one that decreases no impurity: a later split may."""
        left = np.cumsum(histogram, axis=1)
        right = left[:, -1:] - left
        least = self._limits.leaf_rows
        allowed = (left[..., 0] >= least) & (right[..., 0] >= least) & (histogram[..., 0] > 0)
        if not allowed.any():
            return None
        cost = self._cost(left[..., 1:]) + self._cost(right[..., 1:])
        feature, low = np.unravel_index(np.where(allowed, cost, np.inf).argmin(), cost.shape)
        total = float(weight_of(self._nodes[0].sums[1:], self._impurity))
        decrease = (float(self._cost(node.sums[1:])) - float(cost[feature, low])) / total
        if decrease + np.finfo(float).eps < self._limits.decrease:
            return None
        high = int(low) + 1 + int(np.flatnonzero(histogram[feature, low + 1 :, 0])[0])
        threshold = self._job.bins.threshold(int(feature), int(low), high)
        return _Split(int(feature), threshold, left[feature, low], right[feature, low])

    def _cost(self, sums: Array) -> Array:
        found: Array = weight_of(sums, self._impurity) * self._impurity(sums)
        return found

    def _routes(self) -> Routes:
        nodes = self._nodes
        return Routes(
            np.array([node.feature for node in nodes]),
            np.array([node.threshold for node in nodes]),
            np.array([node.left for node in nodes]),
            np.array([node.right for node in nodes]),
        )

    def _tree(self) -> Tree:
        sums = np.stack([node.sums for node in self._nodes])
        targets = sums[:, 1:]
        weight = weight_of(targets, self._impurity)
        values = targets if self._job.classes else targets[:, 1]
        divisor = weight[:, None] if self._job.classes else weight
        return Tree(
            routes=self._routes(),
            value=values / divisor,
            impurity=self._impurity(targets),
            n_node_samples=sums[:, 0].astype(np.int64),
            weighted_n_node_samples=weight,
            depth=np.array([node.depth for node in self._nodes]),
        )

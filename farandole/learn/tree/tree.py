"""A decision tree as arrays, a place in each for every node. The root is node 0."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from farandole.learn.linear.moments import Array

Places = npt.NDArray[np.int64]
LEAF = -2  # scikit-learn's mark


@dataclass(frozen=True)
class Routes:
    """Where rows go: left if the value of `feature` is at most `threshold`."""

    feature: Places
    threshold: Array
    children_left: Places
    children_right: Places

    def apply(self, X: Array) -> Places:
        """The leaf of each row."""
        nodes = np.zeros(len(X), dtype=np.int64)
        rows = np.arange(len(X))
        while True:
            rows = rows[self.feature[nodes[rows]] != LEAF]
            if not len(rows):
                return nodes
            here = nodes[rows]
            left = X[rows, self.feature[here]] <= self.threshold[here]
            nodes[rows] = np.where(left, self.children_left[here], self.children_right[here])


@dataclass(frozen=True)
class Tree:
    """With scikit-learn's names. `value` are shares of classes, or means."""

    routes: Routes
    value: Array
    impurity: Array
    n_node_samples: Places
    weighted_n_node_samples: Array
    depth: Places

    @property
    def node_count(self) -> int:
        return len(self.depth)

    @property
    def max_depth(self) -> int:
        return int(self.depth.max())

    @property
    def n_leaves(self) -> int:
        return int((self.routes.feature == LEAF).sum())

    def importances(self, columns: int) -> Array:
        """The share of each column in the decrease of impurity."""
        found = np.zeros(columns)
        cost = self.weighted_n_node_samples * self.impurity
        for node in np.flatnonzero(self.routes.feature != LEAF):
            left, right = self.routes.children_left[node], self.routes.children_right[node]
            found[self.routes.feature[node]] += cost[node] - cost[left] - cost[right]
        total = found.sum()
        return found / total if total > 0 else found

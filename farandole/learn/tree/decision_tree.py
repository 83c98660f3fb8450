"""Decision trees from histograms: a pass over the data for each level."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import numpy.typing as npt
from sklearn.base import ClassifierMixin, RegressorMixin

from farandole.learn.estimators.base import SumEstimator
from farandole.learn.estimators.classes import encoded
from farandole.learn.estimators.targets import one_target
from farandole.learn.linear.moments import Array
from farandole.learn.statistics.sketch import SketchSum
from farandole.learn.tree.bins import as_bins
from farandole.learn.tree.grow import Grower, Limits
from farandole.learn.tree.impurity import CLASSIFICATION, REGRESSION, Impurity
from farandole.learn.tree.tree import Places, Tree

_SKETCH_PER_BIN = 8  # so that the bins are of nearly equal weight after all merges


class _DecisionTree(SumEstimator):
    """The same parameters for both kinds."""

    criterion: str
    tree_: Tree

    def _set(
        self,
        max_depth: int | None,
        min_samples_split: float,
        min_samples_leaf: float,
        min_impurity_decrease: float,
        max_bins: int,
        pool: Any,
        chunk_rows: int,
    ) -> None:
        self.max_depth = max_depth
        self.min_samples_split = min_samples_split
        self.min_samples_leaf = min_samples_leaf
        self.min_impurity_decrease = min_impurity_decrease
        self.max_bins = max_bins
        self.pool = pool
        self.chunk_rows = chunk_rows

    def _grow(
        self, X: Any, y: Any, sample_weight: Any, classes: int, known: dict[str, Impurity]
    ) -> None:
        if self.criterion not in known:
            raise ValueError(f"criterion={self.criterion!r}: known are {sorted(known)}.")
        if self.max_bins < 2:
            raise ValueError(f"max_bins={self.max_bins}: a split needs 2 or more.")
        if self.max_depth is not None and self.max_depth < 1:
            raise ValueError(f"max_depth={self.max_depth}: it is 1 or more, or None.")
        with self._placed(X, y, sample_weight) as placed:
            rows = placed.source.rows
            limits = Limits(
                self.max_depth,
                _rows("min_samples_split", self.min_samples_split, rows, least=2),
                _rows("min_samples_leaf", self.min_samples_leaf, rows, least=1),
                self.min_impurity_decrease,
            )
            bins = as_bins(placed.sum(SketchSum(_SKETCH_PER_BIN * self.max_bins)), self.max_bins)
            self.tree_ = Grower(placed, bins, classes, known[self.criterion], limits).grow()

    @property
    def feature_importances_(self) -> Array:
        """The share of each column in the decrease of impurity."""
        return self.tree_.importances(self.n_features_in_)

    def apply(self, X: Any) -> Places:
        """The node that each row ends in."""

        def leaves(rows: Any) -> Places:
            return self.tree_.routes.apply(rows.toarray() if hasattr(rows, "toarray") else rows)

        found: Places = self._by_rows(X, leaves)
        return found

    def get_depth(self) -> int:
        return self.tree_.max_depth

    def get_n_leaves(self) -> int:
        return self.tree_.n_leaves


class DecisionTreeClassifier(ClassifierMixin, _DecisionTree):
    """criterion: "gini", or "entropy" ("log_loss" is the same).

    Columns with more than `max_bins` distinct values are split between bins of about equal weight;
    for all others the search is exact. Of equal splits the first column's is taken.
    """

    def __init__(
        self,
        *,
        criterion: str = "gini",
        max_depth: int | None = None,
        min_samples_split: float = 2,
        min_samples_leaf: float = 1,
        min_impurity_decrease: float = 0.0,
        max_bins: int = 256,
        pool: Any = None,
        chunk_rows: int = 0,
    ) -> None:
        self.criterion = criterion
        self._set(
            max_depth,
            min_samples_split,
            min_samples_leaf,
            min_impurity_decrease,
            max_bins,
            pool,
            chunk_rows,
        )

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Of X (rows × columns) and the labels y."""
        self.classes_, places = encoded(y, type(self).__name__)
        self._grow(X, places, sample_weight, len(self.classes_), CLASSIFICATION)
        return self

    def predict_proba(self, X: Any) -> Array:
        """The shares of the classes in the leaf of each row."""
        leaves = self.apply(X)
        return self.tree_.value[leaves]

    def predict_log_proba(self, X: Any) -> Array:
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """The most frequent class in the leaf of each row."""
        places = self.predict_proba(X).argmax(axis=1)
        found: npt.NDArray[Any] = self.classes_[places]
        return found


class DecisionTreeRegressor(RegressorMixin, _DecisionTree):
    """criterion: "squared_error". See `DecisionTreeClassifier` for the other parameters."""

    def __init__(
        self,
        *,
        criterion: str = "squared_error",
        max_depth: int | None = None,
        min_samples_split: float = 2,
        min_samples_leaf: float = 1,
        min_impurity_decrease: float = 0.0,
        max_bins: int = 256,
        pool: Any = None,
        chunk_rows: int = 0,
    ) -> None:
        self.criterion = criterion
        self._set(
            max_depth,
            min_samples_split,
            min_samples_leaf,
            min_impurity_decrease,
            max_bins,
            pool,
            chunk_rows,
        )

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Of X (rows × columns) and the targets y."""
        targets = one_target(y, type(self).__name__)
        # Less their mean: squares of targets far from zero would lose the digits of the variance.
        self._offset = float(targets.mean())
        self._grow(X, targets - self._offset, sample_weight, 0, REGRESSION)
        return self

    def predict(self, X: Any) -> Array:
        """The mean of the leaf of each row."""
        leaves = self.apply(X)
        found: Array = self.tree_.value[leaves] + self._offset
        return found


def _rows(name: str, wanted: float, rows: int, least: int) -> int:
    """A number of rows, or a share of all."""
    if isinstance(wanted, int | np.integer) and wanted >= least:
        return int(wanted)
    if isinstance(wanted, float) and 0 < wanted <= 1:
        return max(least, int(np.ceil(wanted * rows)))
    raise ValueError(f"{name}={wanted!r}: a number of {least} or more, or a share up to 1.0.")

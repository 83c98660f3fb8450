"""An estimator of scikit-learn's kind whose fit is a sequence of sums over chunks of rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from farandole.learn.pools.base import Placed, one_blas_thread
from farandole.learn.pools.choose import as_pool
from farandole.learn.progress import ShownProgress
from farandole.learn.sources.source import Source
from farandole.learn.sources.tables import in_memory, is_outside_memory, require_numeric_table


class SumEstimator(BaseEstimator):
    """`pool` says who computes, `chunk_rows` how many rows at a time (0: about 8 MiB of them).

    Results depend on `chunk_rows` in the last bits, and not on the pool.
    """

    pool: Any
    chunk_rows: int
    _accepts_sparse = True

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = self._accepts_sparse
        return tags

    @contextmanager
    def _placed(
        self,
        X: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        reset: bool = True,
        least_rows: int = 1,
    ) -> Iterator[Placed]:
        """The data with the workers of the pool. `y` is in memory, and has been looked at."""
        source = self._source(X, y, sample_weight, reset=reset, least_rows=least_rows)
        # One thread for products here, too: their rounding depends on the number.
        with (
            one_blas_thread(),
            as_pool(self.pool).place(source) as placed,
            self._shown(placed),
        ):
            yield placed
        self.n_passes_ = placed.passes
        self.report_ = placed.report

    def _source(
        self,
        X: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        reset: bool = True,
        least_rows: int = 1,
    ) -> Source:
        table = self._table(X, reset=reset, least_rows=least_rows)
        rows = int(table.shape[0])
        if y is not None and len(y) != rows:
            raise ValueError(
                f"Found input variables with inconsistent numbers of samples: X has {rows} rows, "
                f"and y has {len(y)}."
            )
        weights = None
        if sample_weight is not None:
            weights = _check_sample_weight(
                sample_weight, np.empty((rows, 0)), dtype=np.float64, ensure_non_negative=True
            )
        return Source(table, y, weights, self.chunk_rows)

    @contextmanager
    def _shown(self, placed: Placed) -> Iterator[None]:
        """With `verbose`, for estimators that have it, the progress."""
        if getattr(self, "verbose", False):
            placed.progress = ShownProgress(type(self).__name__)
        try:
            yield
        finally:
            placed.progress.end()

    def _table(self, X: Any, *, reset: bool, least_rows: int = 1) -> Any:
        X = in_memory(X)
        if not is_outside_memory(X):
            return validate_data(
                self,
                X,
                reset=reset,
                accept_sparse="csr" if self._accepts_sparse else False,
                ensure_all_finite=False,  # chunk by chunk, which says where
                ensure_min_samples=least_rows,
                dtype="numeric",
            )
        require_numeric_table(X)
        if X.shape[0] < least_rows:
            raise ValueError(
                f"Found array with {X.shape[0]} sample(s) (shape={tuple(X.shape)}) while a minimum "
                f"of {least_rows} is required."
            )
        if reset:
            self.n_features_in_ = int(X.shape[1])
        elif X.shape[1] != self.n_features_in_:
            raise ValueError(
                f"X has {X.shape[1]} features, but {type(self).__name__} is expecting "
                f"{self.n_features_in_} features as input."
            )
        return X

    def _by_rows(self, X: Any, work: Any) -> Any:
        """What `work` makes of each chunk, one after the other, in one array."""
        check_is_fitted(self)
        source = Source(self._table(X, reset=False), chunk_rows=self.chunk_rows)
        parts = [work(source.read(number).X) for number in range(source.chunks)]
        return np.concatenate(parts)

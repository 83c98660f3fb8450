"""Naive Bayes: counts and moments of the columns by class, in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from scipy.special import logsumexp
from sklearn.base import ClassifierMixin

from farandole.learn.estimators.base import SumEstimator
from farandole.learn.estimators.classes import encoded
from farandole.learn.estimators.counts import require_counts
from farandole.learn.linear.moments import Array
from farandole.learn.sources.chunk import Chunk
from farandole.learn.sums.sum import Statistics, Sum, as_statistics


@dataclass(frozen=True)
class ClassSum(Sum):
    """Of each class its weight, and the sums of the columns or, `centred`, means and squares."""

    classes: int
    centred: bool

    def map(self, chunk: Chunk, state: Any) -> Statistics:
        assert chunk.y is not None
        members = np.zeros((self.classes, chunk.rows))
        members[chunk.y, np.arange(chunk.rows)] = chunk.weight
        weight = members.sum(axis=1)
        sums = np.asarray(members @ chunk.X)
        if not self.centred:
            return as_statistics(weight=weight, sums=sums)
        mean = np.divide(sums, weight[:, None], out=np.zeros_like(sums), where=weight[:, None] > 0)
        squares = np.asarray(members @ (chunk.X - mean[chunk.y]) ** 2)
        return as_statistics(weight=weight, mean=mean, squares=squares)

    def merge(self, left: Statistics, right: Statistics) -> Statistics:
        if not self.centred:
            return super().merge(left, right)
        m, n = left["weight"][:, None], right["weight"][:, None]
        share = np.divide(n, m + n, out=np.zeros_like(n), where=m + n > 0)
        difference = right["mean"] - left["mean"]
        squares = left["squares"] + right["squares"] + difference**2 * m * share
        mean = left["mean"] + difference * share
        return as_statistics(weight=(m + n)[:, 0], mean=mean, squares=squares)

    def finish(self, statistics: Statistics, state: Any) -> Statistics:
        return statistics


class _NaiveBayes(ClassifierMixin, SumEstimator):
    """Keeps the statistics of all rows so far, to which `partial_fit` adds."""

    classes_: npt.NDArray[Any]
    _statistics: Statistics
    _centred = False

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Of X (rows × columns) and the labels y."""
        self.__dict__.pop("_statistics", None)
        return self._add(X, y, sample_weight, *encoded(y, type(self).__name__), reset=True)

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """More rows. The first call names all `classes`."""
        first = not hasattr(self, "_statistics")
        if first and classes is None:
            raise ValueError("classes must be passed on the first call to partial_fit.")
        if classes is not None:
            given = np.unique(classes)
            if not first and not np.array_equal(given, self.classes_):
                raise ValueError(
                    f"`classes={classes!r}` is not the same as on last call to partial_fit, was: "
                    f"{self.classes_!r}"
                )
            self.classes_ = given
        known, places = encoded(y, type(self).__name__, self.classes_)
        return self._add(X, y, sample_weight, known, places, reset=first)

    def _add(
        self,
        X: Any,
        y: Any,
        sample_weight: Any,
        classes: npt.NDArray[Any],
        places: npt.NDArray[np.int64],
        *,
        reset: bool,
    ) -> Self:
        job = ClassSum(len(classes), self._centred)
        with self._placed(X, places, sample_weight, reset=reset) as placed:
            found = placed.sum(job)
        if not reset:
            found = job.merge(self._statistics, found)
        self.classes_ = classes
        self._statistics = found
        self.class_count_ = found["weight"]
        self._learn(found)
        return self

    def _log_prior(self, given: Any, *, learnt: bool = True) -> Array:
        classes = len(self.classes_)
        if given is not None:
            prior = np.asarray(given, dtype=np.float64)
            if len(prior) != classes:
                raise ValueError("Number of priors must match number of classes.")
            if not np.isclose(prior.sum(), 1.0):
                raise ValueError("The sum of the priors should be 1.")
            if (prior < 0).any():
                raise ValueError("Priors must be non-negative.")
        elif learnt:
            prior = self.class_count_ / self.class_count_.sum()
        else:
            prior = np.full(classes, 1 / classes)
        with np.errstate(divide="ignore"):
            found: Array = np.log(prior)
        return found

    def _learn(self, statistics: Statistics) -> None:
        raise NotImplementedError

    def _joint(self, X: Any) -> Array:
        raise NotImplementedError

    def predict_joint_log_proba(self, X: Any) -> Array:
        """log P(class, row), for each class, up to what all classes have in common."""
        found: Array = self._by_rows(X, self._joint)
        return found

    def predict_log_proba(self, X: Any) -> Array:
        joint = self.predict_joint_log_proba(X)
        found: Array = joint - logsumexp(joint, axis=1, keepdims=True)
        return found

    def predict_proba(self, X: Any) -> Array:
        """The probability of each class."""
        return np.exp(self.predict_log_proba(X))

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """The most probable class of each row."""
        places = self.predict_joint_log_proba(X).argmax(axis=1)
        found: npt.NDArray[Any] = self.classes_[places]
        return found


class GaussianNB(_NaiveBayes):
    """Each column of each class is normal. `var_smoothing` times the largest variance is added."""

    _accepts_sparse = False
    _centred = True

    def __init__(
        self,
        *,
        priors: Any = None,
        var_smoothing: float = 1e-9,
        pool: Any = None,
        chunk_rows: int = 0,
    ) -> None:
        self.priors = priors
        self.var_smoothing = var_smoothing
        self.pool = pool
        self.chunk_rows = chunk_rows

    def _learn(self, statistics: Statistics) -> None:
        weight = statistics["weight"][:, None]
        mean, squares = statistics["mean"], statistics["squares"]
        all_rows = weight.sum()
        overall = (weight * mean).sum(axis=0) / all_rows
        variance = (squares + weight * (mean - overall) ** 2).sum(axis=0) / all_rows
        self.epsilon_ = float(self.var_smoothing * variance.max(initial=0.0))
        self.theta_ = mean
        own = np.divide(squares, weight, out=np.zeros_like(squares), where=weight > 0)
        self.var_ = own + self.epsilon_
        self.class_prior_ = np.exp(self._log_prior(self.priors))

    def _joint(self, X: Array) -> Array:
        found = np.empty((len(X), len(self.classes_)))
        with np.errstate(divide="ignore"):
            prior = np.log(self.class_prior_)
        for place, (mean, variance) in enumerate(zip(self.theta_, self.var_, strict=True)):
            constant = prior[place] - 0.5 * np.log(2 * np.pi * variance).sum()
            found[:, place] = constant - 0.5 * ((X - mean) ** 2 / variance).sum(axis=1)
        return found


class MultinomialNB(_NaiveBayes):
    """The columns are counts. `alpha` is added to those of each class."""

    def __init__(
        self,
        *,
        alpha: float = 1.0,
        fit_prior: bool = True,
        class_prior: Any = None,
        pool: Any = None,
        chunk_rows: int = 0,
    ) -> None:
        self.alpha = alpha
        self.fit_prior = fit_prior
        self.class_prior = class_prior
        self.pool = pool
        self.chunk_rows = chunk_rows

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = True
        tags.classifier_tags.poor_score = True  # on data that are no counts
        return tags

    def _table(self, X: Any, *, reset: bool, least_rows: int = 1) -> Any:
        table = super()._table(X, reset=reset, least_rows=least_rows)
        require_counts(table, "MultinomialNB")
        return table

    def _learn(self, statistics: Statistics) -> None:
        if not self.alpha >= 0:
            raise ValueError(f"alpha={self.alpha!r}: it is 0 or more.")
        if statistics["sums"].min(initial=0.0) < 0:
            raise ValueError("Negative values in data passed to MultinomialNB (input X)")
        self.feature_count_ = statistics["sums"]
        smoothed = self.feature_count_ + max(self.alpha, 1e-10)
        self.feature_log_prob_ = np.log(smoothed) - np.log(smoothed.sum(axis=1, keepdims=True))
        self.class_log_prior_ = self._log_prior(self.class_prior, learnt=self.fit_prior)

    def _joint(self, X: Any) -> Array:
        found: Array = X @ self.feature_log_prob_.T + self.class_log_prior_
        return found

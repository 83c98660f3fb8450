"""Latent Dirichlet allocation: topics of documents, given as counts of words."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from farandole.learn.estimators.base import SumEstimator
from farandole.learn.estimators.counts import LeastSum, require_counts
from farandole.learn.linear.moments import Array
from farandole.learn.sums.seed import SeedSum
from farandole.learn.sums.together import Together
from farandole.learn.topics.variational import (
    BoundSum,
    Topics,
    WordSum,
    document_topics,
    expected_logs,
)


class LatentDirichletAllocation(ClassNamePrefixFeaturesOutMixin, TransformerMixin, SumEstimator):
    """By variational inference on all documents: `max_iter` passes.

    Priors are 1 / n_components unless given. With `perp_tol`, iterations end when the perplexity
    falls by less than this, which takes a second pass for each.
    """

    def __init__(
        self,
        n_components: int = 10,
        *,
        doc_topic_prior: float | None = None,
        topic_word_prior: float | None = None,
        max_iter: int = 10,
        perp_tol: float | None = None,
        mean_change_tol: float = 1e-3,
        max_doc_update_iter: int = 100,
        random_state: Any = None,
        pool: Any = None,
        chunk_rows: int = 0,
    ) -> None:
        self.n_components = n_components
        self.doc_topic_prior = doc_topic_prior
        self.topic_word_prior = topic_word_prior
        self.max_iter = max_iter
        self.perp_tol = perp_tol
        self.mean_change_tol = mean_change_tol
        self.max_doc_update_iter = max_doc_update_iter
        self.random_state = random_state
        self.pool = pool
        self.chunk_rows = chunk_rows

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = True
        return tags

    def _table(self, X: Any, *, reset: bool, least_rows: int = 1) -> Any:
        table = super()._table(X, reset=reset, least_rows=least_rows)
        require_counts(table, type(self).__name__)
        return table

    def fit(self, X: Any, y: Any = None) -> Self:
        """Of X (documents × words), the counts. `y` is not used."""
        self._require_options()
        self._set_priors()
        with self._placed(X) as placed:
            first = placed.sum(Together(least=LeastSum(), seed=SeedSum(self.random_state)))
            if first["least"] < 0:
                raise ValueError(
                    f"Negative values in data passed to {type(self).__name__} (input X)"
                )
            # As scikit-learn's, so that the same `random_state` starts with the same topics.
            words = np.random.RandomState(first["seed"]).gamma(
                100.0, 0.01, (self.n_components, placed.source.columns)
            )
            topics = self._topics(words)
            perplexity = np.inf
            for iteration in range(1, self.max_iter + 1):
                self.n_iter_ = iteration
                words = self.topic_word_prior_ + placed.sum(WordSum(), topics)
                topics = topics._replace(words=words)
                if self.perp_tol is None:
                    continue
                before, perplexity = perplexity, self._perplexity(placed, topics)
                if before - perplexity < self.perp_tol:
                    break
            self.bound_ = self._perplexity(placed, topics)
        self.components_ = topics.words
        self.exp_dirichlet_component_ = np.exp(expected_logs(topics.words))
        return self

    def _require_options(self) -> None:
        if min(self.n_components, self.max_iter, self.max_doc_update_iter) < 1:
            raise ValueError(
                f"n_components={self.n_components}, max_iter={self.max_iter}, max_doc_update_iter="
                f"{self.max_doc_update_iter}: each is 1 or more."
            )
        for name in ("doc_topic_prior", "topic_word_prior"):
            given = getattr(self, name)
            if given is not None and not given > 0:
                raise ValueError(f"{name}={given!r}: it is above 0.")

    def _set_priors(self) -> None:
        equal = 1 / self.n_components
        self.doc_topic_prior_ = equal if self.doc_topic_prior is None else self.doc_topic_prior
        self.topic_word_prior_ = equal if self.topic_word_prior is None else self.topic_word_prior

    def _topics(self, words: Array) -> Topics:
        return Topics(words, self.doc_topic_prior_, self.mean_change_tol, self.max_doc_update_iter)

    def _perplexity(self, placed: Any, topics: Topics) -> float:
        bound, words = placed.sum(BoundSum(self.topic_word_prior_), topics)
        return float(np.exp(-bound / words)) if words > 0 else 1.0

    def transform(self, X: Any) -> Array:
        """The shares of the topics in each document."""
        topics = self._fitted_topics()
        found: Array = self._by_rows(X, lambda rows: document_topics(rows, topics)[0])
        found /= found.sum(axis=1, keepdims=True)
        return found

    def score(self, X: Any, y: Any = None) -> float:
        """A lower bound of the log likelihood."""
        topics = self._fitted_topics()
        with self._placed(X, reset=False) as placed:
            return float(placed.sum(BoundSum(self.topic_word_prior_), topics)[0])

    def perplexity(self, X: Any) -> float:
        """exp(−the bound for each word): the lower the better."""
        topics = self._fitted_topics()
        with self._placed(X, reset=False) as placed:
            return self._perplexity(placed, topics)

    def _fitted_topics(self) -> Topics:
        check_is_fitted(self)
        return self._topics(self.components_)

    @property
    def _n_features_out(self) -> int:
        return len(self.components_)

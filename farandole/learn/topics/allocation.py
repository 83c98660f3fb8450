"""Latent Dirichlet allocation: topics of documents, given as counts of words."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from farandole.learn.estimators.base import SumEstimator
from farandole.learn.estimators.counts import LeastSum, require_counts
from farandole.learn.linear.moments import Array
from farandole.learn.pools.base import Placed
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

    `partial_fit` takes documents as they come, as a sample of `total_samples`: the t-th call moves
    the topics by (learning_offset + t) ** −learning_decay towards those of its documents.
    """

    def __init__(
        self,
        n_components: int = 10,
        *,
        doc_topic_prior: float | None = None,
        topic_word_prior: float | None = None,
        max_iter: int = 10,
        learning_decay: float = 0.7,
        learning_offset: float = 10.0,
        total_samples: float = 1e6,
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
        self.learning_decay = learning_decay
        self.learning_offset = learning_offset
        self.total_samples = total_samples
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
            topics = self._topics(self._start(placed))
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
        self.n_batch_iter_ = 1 + self.n_iter_
        return self._keep(topics.words)

    def partial_fit(self, X: Any, y: Any = None) -> Self:
        """One step with these documents, in a pass or two. The first call begins the topics."""
        self._require_options()
        begins = not hasattr(self, "components_")
        with self._placed(X, reset=begins) as placed:
            start = self._start(placed)
            if begins:
                self._set_priors()
            before = start if begins else self.components_
            words = placed.sum(WordSum(), self._topics(before))
            rows = placed.source.rows
        turn = 1 if begins else self.n_batch_iter_
        step = (self.learning_offset + turn) ** -self.learning_decay
        new = self.topic_word_prior_ + self.total_samples / rows * words
        self.n_iter_, self.n_batch_iter_ = turn, turn + 1
        return self._keep((1 - step) * before + step * new)

    def _start(self, placed: Placed) -> Array:
        """Topics to begin with. Raises `ValueError` for counts below 0."""
        first = placed.sum(Together(least=LeastSum(), seed=SeedSum(self.random_state)))
        if first["least"] < 0:
            raise ValueError(f"Negative values in data passed to {type(self).__name__} (input X)")
        # As scikit-learn's, so that the same `random_state` starts with the same topics.
        found: Array = np.random.RandomState(first["seed"]).gamma(
            100.0, 0.01, (self.n_components, placed.source.columns)
        )
        return found

    def _keep(self, words: Array) -> Self:
        self.components_ = words
        self.exp_dirichlet_component_ = np.exp(expected_logs(words))
        return self

    def _require_options(self) -> None:
        if min(self.n_components, self.max_iter, self.max_doc_update_iter) < 1:
            raise ValueError(
                f"n_components={self.n_components}, max_iter={self.max_iter}, max_doc_update_iter="
                f"{self.max_doc_update_iter}: each is 1 or more."
            )
        if not 0 <= self.learning_decay <= 1 or not self.learning_offset >= 0:
            raise ValueError(
                f"learning_decay={self.learning_decay}, learning_offset={self.learning_offset}: "
                "the first is between 0 and 1, and the second 0 or more."
            )
        for name in ("doc_topic_prior", "topic_word_prior", "total_samples"):
            given = getattr(self, name)
            if given is not None and not given > 0:
                raise ValueError(f"{name}={given!r}: it is above 0.")

    def _set_priors(self) -> None:
        equal = 1 / self.n_components
        self.doc_topic_prior_ = equal if self.doc_topic_prior is None else self.doc_topic_prior
        self.topic_word_prior_ = equal if self.topic_word_prior is None else self.topic_word_prior

    def _topics(self, words: Array) -> Topics:
        return Topics(words, self.doc_topic_prior_, self.mean_change_tol, self.max_doc_update_iter)

    def _perplexity(self, placed: Placed, topics: Topics) -> float:
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

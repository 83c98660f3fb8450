"""Latent Dirichlet allocation by variational inference (Blei, Ng and Jordan 2003), as sums.

The topics of a document are found from its words and the present topics alone. The topics follow
from sums over all documents: how often each topic is the origin of each word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse
from scipy.special import gammaln, logsumexp, psi

from farandole.learn.linear.moments import Array
from farandole.learn.sources.chunk import Chunk
from farandole.learn.sums.sum import Statistics, Sum, as_statistics


class Topics(NamedTuple):
    """`words`: topics × words, parameters of Dirichlet distributions."""

    words: Array
    topic_prior: float  # of documents' topics
    tolerance: float
    iterations: int  # most of them, for each document


def expected_logs(parameters: Array) -> Array:
    """Of a variable with these parameters of a Dirichlet distribution, by rows."""
    found: Array = psi(parameters) - psi(parameters.sum(axis=1, keepdims=True))
    return found


def rows_of(X: Any) -> Any:
    return scipy.sparse.csr_array(X)


def document_topics(X: Any, topics: Topics) -> tuple[Array, Any]:
    """Parameters of the topics of each document, and counts over their mixed rates.

    Each document stops by itself, so that its result does not depend on others in the chunk.
    """
    X = rows_of(X)
    beta = np.exp(expected_logs(topics.words)).T  # words × topics
    found = np.ones((X.shape[0], beta.shape[1]))
    rows, words = np.arange(X.shape[0]), X
    moving = np.ones(len(rows), dtype=bool)
    for _ in range(topics.iterations):
        before = found[rows]
        theta = np.exp(expected_logs(before))
        new = topics.topic_prior + theta * (_over_rates(words, theta, beta) @ beta)
        found[rows[moving]] = new[moving]
        moving &= np.abs(new - before).mean(axis=1) >= topics.tolerance
        left = int(moving.sum())
        if not left:
            break
        if left < len(rows) / 2:  # to choose rows takes as long as an iteration
            rows = rows[moving]
            words, moving = X[rows], np.ones(left, dtype=bool)
    return found, _over_rates(X, np.exp(expected_logs(found)), beta)


def _over_rates(X: Any, theta: Array, beta: Array) -> Any:
    """Each count, divided by how probable its word is in its document."""
    rows = np.repeat(np.arange(X.shape[0]), np.diff(X.indptr))
    rates = np.einsum("ij,ij->i", theta[rows], beta[X.indices]) + np.finfo(float).eps
    return scipy.sparse.csr_array((X.data / rates, X.indices, X.indptr), shape=X.shape)


class WordSum(Sum):
    """How often each topic is the origin of each word. The state are the topics."""

    def map(self, chunk: Chunk, state: Topics) -> Statistics:
        documents, over_rates = document_topics(chunk.X, state)
        theta = np.exp(expected_logs(documents))
        return as_statistics(words=np.asarray((over_rates.T @ theta).T))

    def finish(self, statistics: Statistics, state: Topics) -> Array:
        found: Array = statistics["words"] * np.exp(expected_logs(state.words))
        return found


@dataclass(frozen=True)
class BoundSum(Sum):
    """A lower bound of the log likelihood of the documents, and the number of words."""

    word_prior: float

    def map(self, chunk: Chunk, state: Topics) -> Statistics:
        X = rows_of(chunk.X)
        documents, _ = document_topics(X, state)
        logs = expected_logs(documents)
        words = expected_logs(state.words).T
        rows = np.repeat(np.arange(X.shape[0]), np.diff(X.indptr))
        bound = float(X.data @ logsumexp(logs[rows] + words[X.indices], axis=1))
        bound += _against_prior(state.topic_prior, documents, logs)
        return as_statistics(bound=bound, words=X.data.sum())

    def finish(self, statistics: Statistics, state: Topics) -> tuple[float, float]:
        topics = _against_prior(self.word_prior, state.words, expected_logs(state.words))
        return float(statistics["bound"]) + topics, float(statistics["words"])


def _against_prior(prior: float, parameters: Array, logs: Array) -> float:
    """E[log p − log q], of all rows."""
    size = parameters.shape[1]
    found = ((prior - parameters) * logs + gammaln(parameters) - gammaln(prior)).sum()
    found += (gammaln(prior * size) - gammaln(parameters.sum(axis=1))).sum()
    return float(found)

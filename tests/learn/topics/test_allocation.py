"""Topics of documents that were made of topics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse
import sklearn.decomposition

from farandole.learn import LatentDirichletAllocation


def documents(count: int, words: int, topics: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    beta = random.dirichlet(np.full(words, 0.1), topics)
    theta = random.dirichlet(np.full(topics, 0.2), count)
    return np.stack([random.multinomial(60, row @ beta) for row in theta]).astype(float)


X = documents(60, 30, 3, seed=0)


@pytest.mark.parametrize("kind", [np.asarray, scipy.sparse.csr_array])
def test_its_topics_are_as_good_as_those_of_scikit_learn(kind: Any) -> None:
    options: dict[str, Any] = {
        "random_state": 0,
        "max_iter": 20,
        "mean_change_tol": 1e-5,
        "max_doc_update_iter": 300,
    }
    ours = LatentDirichletAllocation(3, chunk_rows=25, **options).fit(kind(X))
    theirs = sklearn.decomposition.LatentDirichletAllocation(3, **options).fit(X)
    # Not the topics themselves: scikit-learn starts each document at random, and we do not.
    assert ours.perplexity(X) <= 1.001 * theirs.perplexity(X)
    theirs.components_ = ours.components_
    theirs.exp_dirichlet_component_ = ours.exp_dirichlet_component_
    np.testing.assert_allclose(ours.transform(kind(X)), theirs.transform(X), atol=1e-4)
    np.testing.assert_allclose(ours.score(kind(X)), theirs.score(X), rtol=1e-6)
    np.testing.assert_allclose(ours.bound_, ours.perplexity(X), rtol=1e-12)


def test_it_ends_when_the_perplexity_rests() -> None:
    found = LatentDirichletAllocation(3, random_state=0, max_iter=100, perp_tol=0.05).fit(X)
    assert 2 < found.n_iter_ < 100


def test_partial_fit_steps_like_scikit_learn() -> None:
    options: dict[str, Any] = {
        "random_state": 0,
        "mean_change_tol": 1e-9,
        "max_doc_update_iter": 2000,
        "total_samples": 60,
    }
    ours = LatentDirichletAllocation(3, chunk_rows=7, **options)
    theirs = sklearn.decomposition.LatentDirichletAllocation(3, **options)
    for part in np.split(X, 3):
        ours.partial_fit(part)
        theirs.partial_fit(part)
        np.testing.assert_allclose(ours.components_, theirs.components_, rtol=1e-3)
    assert ours.n_batch_iter_ == theirs.n_batch_iter_ == 4
    with pytest.raises(ValueError, match="30 features"):
        ours.partial_fit(X[:, :5])


def test_documents_without_words() -> None:
    empty = np.vstack([X[:20], np.zeros((2, 30))])
    found = LatentDirichletAllocation(3, random_state=0, max_iter=3).fit(empty)
    np.testing.assert_allclose(found.transform(empty)[-1], 1 / 3)
    nothing = LatentDirichletAllocation(2, random_state=0, max_iter=2).fit(np.zeros((3, 2)))
    assert nothing.bound_ == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_components": 0}, "n_components=0"),
        ({"doc_topic_prior": 0}, "doc_topic_prior=0"),
        ({"topic_word_prior": -1}, "topic_word_prior=-1"),
        ({"learning_decay": 2}, "learning_decay=2"),
        ({"total_samples": 0}, "total_samples=0"),
    ],
)
def test_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LatentDirichletAllocation(**options).fit(X)


def test_counts_below_zero(tmp_path: Any) -> None:
    for rows in (-X, scipy.sparse.csr_array(-X)):
        with pytest.raises(ValueError, match="Negative values in data"):
            LatentDirichletAllocation(3).fit(rows)

"""Learning by sums: estimators of scikit-learn's kind on data that one process could not hold.

Each is a map over chunks of rows and a sum of what it returns; `sums` is the one seam. The sums are
computed by threads of this process, by processes, by any executor, by Ray or Dask, or by the ranks
of a run, with the same bits on all of them. `LBFGS` does the same for the loss of a torch model.

Names are imported when first used: the processes of a pool need neither scikit-learn nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farandole.learn.bayes.naive import GaussianNB, MultinomialNB
    from farandole.learn.cluster.kmeans import KMeans
    from farandole.learn.cluster.spectral import SpectralClustering
    from farandole.learn.decomposition.ica import FastICA
    from farandole.learn.decomposition.pca import PCA
    from farandole.learn.decomposition.truncated_svd import TruncatedSVD
    from farandole.learn.lbfgs.optimizer import LBFGS as LBFGS
    from farandole.learn.linear.local import LocallyWeightedRegression
    from farandole.learn.linear.logistic import LogisticRegression
    from farandole.learn.linear.regression import ElasticNet, Lasso, LinearRegression, Ridge
    from farandole.learn.linear.svm import LinearSVC
    from farandole.learn.mixture.gaussian import GaussianMixture
    from farandole.learn.neural.perceptron import MLPClassifier, MLPRegressor
    from farandole.learn.statistics.description import describe
    from farandole.learn.topics.allocation import LatentDirichletAllocation
    from farandole.learn.tree.decision_tree import DecisionTreeClassifier, DecisionTreeRegressor

_HOME = {
    "DecisionTreeClassifier": "farandole.learn.tree.decision_tree",
    "DecisionTreeRegressor": "farandole.learn.tree.decision_tree",
    "describe": "farandole.learn.statistics.description",
    "ElasticNet": "farandole.learn.linear.regression",
    "FastICA": "farandole.learn.decomposition.ica",
    "GaussianMixture": "farandole.learn.mixture.gaussian",
    "GaussianNB": "farandole.learn.bayes.naive",
    "KMeans": "farandole.learn.cluster.kmeans",
    "Lasso": "farandole.learn.linear.regression",
    "LatentDirichletAllocation": "farandole.learn.topics.allocation",
    "LBFGS": "farandole.learn.lbfgs.optimizer",
    "LinearRegression": "farandole.learn.linear.regression",
    "LinearSVC": "farandole.learn.linear.svm",
    "LocallyWeightedRegression": "farandole.learn.linear.local",
    "LogisticRegression": "farandole.learn.linear.logistic",
    "MLPClassifier": "farandole.learn.neural.perceptron",
    "MLPRegressor": "farandole.learn.neural.perceptron",
    "MultinomialNB": "farandole.learn.bayes.naive",
    "PCA": "farandole.learn.decomposition.pca",
    "Ridge": "farandole.learn.linear.regression",
    "SpectralClustering": "farandole.learn.cluster.spectral",
    "TruncatedSVD": "farandole.learn.decomposition.truncated_svd",
}

__all__ = [
    "PCA",
    "DecisionTreeClassifier",
    "DecisionTreeRegressor",
    "ElasticNet",
    "FastICA",
    "GaussianMixture",
    "GaussianNB",
    "KMeans",
    "Lasso",
    "LatentDirichletAllocation",
    "LinearRegression",
    "LinearSVC",
    "LocallyWeightedRegression",
    "LogisticRegression",
    "MLPClassifier",
    "MLPRegressor",
    "MultinomialNB",
    "Ridge",
    "SpectralClustering",
    "TruncatedSVD",
    "describe",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'farandole.learn' has no attribute {name!r}")
    found = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})

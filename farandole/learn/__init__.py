"""Learning by sums: estimators of scikit-learn's kind on data that one process could not hold.

Each is a map over chunks of rows and a sum of what it returns; `sums` is the one seam. The sums are
computed by threads of this process, by processes, by any executor, by Ray or Dask, or by the ranks
of a run, with the same bits on all of them. `LBFGS` does the same for the loss of a torch model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farandole.learn.bayes.naive import GaussianNB, MultinomialNB
from farandole.learn.cluster.kmeans import KMeans
from farandole.learn.cluster.spectral import SpectralClustering
from farandole.learn.decomposition.ica import FastICA
from farandole.learn.decomposition.pca import PCA
from farandole.learn.decomposition.truncated_svd import TruncatedSVD
from farandole.learn.describe.description import describe
from farandole.learn.linear.local import LocallyWeightedRegression
from farandole.learn.linear.logistic import LogisticRegression
from farandole.learn.linear.regression import ElasticNet, Lasso, LinearRegression, Ridge
from farandole.learn.linear.svm import LinearSVC
from farandole.learn.mixture.gaussian import GaussianMixture
from farandole.learn.neural.perceptron import MLPClassifier, MLPRegressor
from farandole.learn.topics.allocation import LatentDirichletAllocation
from farandole.learn.tree.decision_tree import DecisionTreeClassifier, DecisionTreeRegressor

if TYPE_CHECKING:
    from farandole.learn.lbfgs.optimizer import LBFGS as LBFGS

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
    if name == "LBFGS":  # the estimators need no torch
        from farandole.learn.lbfgs.optimizer import LBFGS

        return LBFGS
    raise AttributeError(f"module 'farandole.learn' has no attribute {name!r}")

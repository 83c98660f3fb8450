"""Learning by sums: estimators of scikit-learn's kind on data that one process could not hold.

Each is a map over chunks of rows and a sum of what it returns; `sums` is the one seam. The sums are
computed by threads of this process, by processes, by any executor, or by the ranks of a run, with
the same bits on all of them.
"""

from __future__ import annotations

from farandole.learn.bayes.naive import GaussianNB, MultinomialNB
from farandole.learn.cluster.kmeans import KMeans
from farandole.learn.decomposition.pca import PCA
from farandole.learn.linear.logistic import LogisticRegression
from farandole.learn.linear.regression import ElasticNet, Lasso, LinearRegression, Ridge

__all__ = [
    "PCA",
    "ElasticNet",
    "GaussianNB",
    "KMeans",
    "Lasso",
    "LinearRegression",
    "LogisticRegression",
    "MultinomialNB",
    "Ridge",
]

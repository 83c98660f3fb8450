"""Estimators of scikit-learn's kind on threads, processes or the ranks of a job.

    python examples/learn.py                       threads of one process
    python examples/learn.py --processes 2         two processes
    farandole run -n 2 examples/learn.py           two ranks: the same bits

The data ship with scikit-learn: 1,797 images of 8×8 hand-written digits.
"""

import argparse

from sklearn.datasets import load_digits
from sklearn.pipeline import make_pipeline

import farandole as fd
from farandole.learn import PCA, DecisionTreeClassifier, KMeans, LogisticRegression, describe

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--processes", type=int, help="instead of threads")
args = parser.parse_args()

run = fd.init()
pool = run if run.size > 1 else args.processes
X, y = load_digits(return_X_y=True)

model = make_pipeline(
    PCA(30, pool=pool, chunk_rows=100),
    LogisticRegression(C=0.01, solver="lbfgs", tol=1e-4, pool=pool, chunk_rows=100),
)
accuracy = model.fit(X[:1200], y[:1200]).score(X[1200:], y[1200:])
clusters = KMeans(10, random_state=0, pool=pool, chunk_rows=100).fit(X)
tree = DecisionTreeClassifier(max_depth=8, pool=pool, chunk_rows=100).fit(X[:1200], y[:1200])
columns = describe(X, pool=pool, chunk_rows=100)
if run.rank == 0:
    print(f"accuracy {accuracy:.4f}, inertia {clusters.inertia_!r}")
    print(f"tree: accuracy {tree.score(X[1200:], y[1200:]):.4f} with {tree.get_n_leaves()} leaves")
    print(f"column 20: median {columns.median[20]:g}, {columns.unique[20]} distinct values")

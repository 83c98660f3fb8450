"""One side of the comparison: fits one estimator of one library, and prints seconds and objective.

    python side.py DTYPE LIBRARY ALGORITHM FOLDER WORKERS

Started as a process of its own, by the interpreter in which the library is installed. It imports
nothing of Farandole unless this is the library. Reading the data into memory is not timed; a first
fit on few rows, also not timed, starts workers and compiles what has to be compiled.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import resource
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ITERATIONS = 20  # of k-means, all from the same centres
COMPONENTS = 10
ALPHA = 0.1
Fit = Callable[[Any, Any, Any], dict[str, Any]]


def farandole(algorithm: str, start: Any, workers: str) -> Fit:
    """With "threads", a number of processes, or "kept NUMBER"."""
    from farandole import learn
    from farandole.learn.pools.processes import Processes

    pool: Any = None
    if workers.startswith("kept"):
        pool = Processes(int(workers.split()[1])).__enter__()
        atexit.register(pool.__exit__)
    elif workers != "threads":
        pool = int(workers)
    makers = {
        "kmeans": lambda: learn.KMeans(
            len(start), init=start, max_iter=ITERATIONS, tol=0, pool=pool
        ),
        "pca": lambda: learn.PCA(COMPONENTS, pool=pool),
        "lasso": lambda: learn.Lasso(ALPHA, pool=pool),
        "logistic": lambda: learn.LogisticRegression(tol=1e-5, pool=pool),
    }
    return _scikit_learn_like(makers[algorithm], algorithm)


def sklearn(algorithm: str, start: Any, workers: str) -> Fit:
    from sklearn.cluster import KMeans
    from sklearn.decomposition import PCA
    from sklearn.linear_model import Lasso, LogisticRegression

    makers = {
        "kmeans": lambda: KMeans(len(start), init=start, n_init=1, max_iter=ITERATIONS, tol=0),
        "pca": lambda: PCA(COMPONENTS, svd_solver="covariance_eigh"),
        "lasso": lambda: Lasso(ALPHA, precompute=True, tol=1e-6),
        "logistic": lambda: LogisticRegression(solver="newton-cholesky", tol=1e-5),
    }
    return _scikit_learn_like(makers[algorithm], algorithm)


def dask_ml(algorithm: str, start: Any, workers: str) -> Fit:
    import dask
    import dask.array as da
    from dask_ml.cluster import KMeans
    from dask_ml.decomposition import PCA
    from dask_ml.linear_model import LinearRegression, LogisticRegression

    dask.config.set(scheduler="threads", num_workers=int(workers))
    makers = {
        "kmeans": lambda: KMeans(len(start), init=start, max_iter=ITERATIONS, tol=0),
        "pca": lambda: PCA(COMPONENTS),
        "lasso": lambda: LinearRegression(penalty="l1", C=1 / ALPHA, solver="proximal_grad"),
        "logistic": lambda: LogisticRegression(solver="lbfgs", C=1.0),
    }
    inner = _scikit_learn_like(makers[algorithm], algorithm)

    def fit(X: Any, y: Any, labels: Any) -> dict[str, Any]:
        rows = max(1, len(X) // 16)
        parts = (
            da.from_array(X, chunks=(rows, X.shape[1])),
            *(da.from_array(a, chunks=rows) for a in (y, labels)),
        )
        return inner(*parts)

    return fit


def heat(algorithm: str, start: Any, workers: str) -> Fit:
    """Started by `mpirun`: each process has its part of the rows."""
    _stand_in_for_torchvision()
    import heat as ht

    makers = {
        "kmeans": lambda: ht.cluster.KMeans(
            len(start), init=ht.array(start.astype(np.float32)), max_iter=ITERATIONS, tol=0
        ),
        "pca": lambda: ht.decomposition.PCA(COMPONENTS, svd_solver="hierarchical"),
        "lasso": lambda: ht.regression.Lasso(lam=ALPHA, max_iter=100, tol=1e-6),
    }
    if algorithm not in makers:
        print(f"LEFT OUT: HeAT has no {algorithm}", flush=True)
        raise SystemExit(0)
    inner = _scikit_learn_like(makers[algorithm], algorithm)

    def fit(X: Any, y: Any, labels: Any) -> dict[str, Any]:
        if algorithm == "lasso":  # its first column is the intercept's
            X = np.hstack([np.ones((len(X), 1), X.dtype), X])
        parts = [ht.array(np.asarray(a), split=0) for a in (X, y[:, None])]
        return inner(parts[0], parts[1], labels)

    return fit


def _stand_in_for_torchvision() -> None:
    """HeAT imports it for data sets of images, which nobody needs here."""
    if importlib.util.find_spec("torchvision"):
        return
    whole = types.ModuleType("torchvision")
    for name, member in (("datasets", "MNIST"), ("transforms", "Compose")):
        part = types.ModuleType(f"torchvision.{name}")
        setattr(part, member, type(member, (), {}))
        setattr(whole, name, part)
        sys.modules[f"torchvision.{name}"] = part
    sys.modules["torchvision"] = whole


def _scikit_learn_like(make: Callable[[], Any], algorithm: str) -> Fit:
    def fit(X: Any, y: Any, labels: Any) -> dict[str, Any]:
        model = make()
        begin = time.perf_counter()
        if algorithm in ("kmeans", "pca"):
            model.fit(X)
        else:
            model.fit(X, y if algorithm == "lasso" else labels)
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "model": model}

    return fit


def plain(value: Any) -> Any:
    """HeAT's arrays, and all others, as NumPy's."""
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value, dtype=np.float64)


def objective(algorithm: str, model: Any, X: Any, y: Any, labels: Any) -> float:
    """Of the first rows, by the same formula for every library: the lower the better."""
    X = np.asarray(X[:100_000], dtype=np.float64)
    if algorithm == "kmeans":
        centres = plain(model.cluster_centers_)
        distances = (X**2).sum(axis=1)[:, None] - 2 * X @ centres.T + (centres**2).sum(axis=1)
        return float(distances.min(axis=1).mean())
    if algorithm == "pca":
        components = plain(model.components_)
        if components.shape[1] != X.shape[1]:
            components = components.T
        centred = X - X.mean(axis=0)
        return float(((centred - centred @ components.T @ components) ** 2).sum(axis=1).mean())
    coefficients = plain(model.coef_).ravel()[-X.shape[1] :]
    scores = X @ coefficients + float(plain(model.intercept_).ravel()[0])
    if algorithm == "lasso":
        error = np.asarray(y[: len(X)], dtype=np.float64) - scores
        return float((error**2).mean() / 2 + ALPHA * np.abs(coefficients).sum())
    signs = np.where(np.asarray(labels[: len(X)]) > 0, 1.0, -1.0)
    return float(np.logaddexp(0, -signs * scores).mean())


def main() -> None:
    dtype, library, algorithm, folder, workers = sys.argv[1:]
    data = [np.load(Path(folder) / f"{name}.npy") for name in ("X", "y", "labels")]
    data[:2] = [part.astype(dtype, copy=False) for part in data[:2]]
    start = np.load(Path(folder) / "start.npy").astype(np.float64)
    fit = {"farandole": farandole, "sklearn": sklearn, "dask-ml": dask_ml, "heat": heat}[library](
        algorithm, start, workers
    )
    fit(*(part[:5000] for part in data))
    found = fit(*data)
    model = found.pop("model")
    found["objective"] = objective(algorithm, model, *data)
    found["peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

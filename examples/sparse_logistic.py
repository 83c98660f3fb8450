"""Logistic regression with an L1 penalty over millions of keys, most of which are never used.

    python examples/sparse_logistic.py
    python examples/sparse_logistic.py --documents 200000 --l1 50 --workers 4 --servers 4

Each document has 30 features, hashed to 4 million keys. Every worker has a share of the documents.
It fetches the weights of the keys in its share, and pushes their gradients. The servers take the
proximal step, which makes useless weights exactly 0. The KKT filter skips gradients of weights that
stay 0. At the end scikit-learn solves the same problem in one process, for comparison.

Workers are threads here, because threads start fast. Each has its own store, as a process would.
"""

import argparse
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.special import expit
from sklearn.linear_model import LogisticRegression

from farandole.server import Cluster, Store, connect
from farandole.server.client.filtered import Filtered
from farandole.server.filters import Savings

KEYS = 1 << 22
FEATURES = 30  # in a document

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--documents", type=int, default=10_000)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument(
    "--l1",
    type=float,
    default=10.0,
    help="weight of the L1 penalty, relative to the sum of all losses",
)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--servers", type=int, default=2)
parser.add_argument("--filter", action=argparse.BooleanOptionalAction, default=True)
args = parser.parse_args()


def documents(count: int) -> tuple[csr_array, np.ndarray]:
    """Features as rare and as frequent as words, and labels that depend on a few of them."""
    rng = np.random.default_rng(0)
    words = np.exp(rng.random(count * FEATURES) * np.log(KEYS)).astype(np.int64)
    ends = np.arange(0, count * FEATURES + 1, FEATURES, dtype=np.int32)
    x = csr_array((np.ones(len(words)), hashed(words), ends), shape=(count, KEYS))
    x.sum_duplicates()
    truth = np.zeros(KEYS)
    truth[hashed(np.arange(1, 2001))] = rng.normal(0, 1.5, 2000) * (rng.random(2000) < 0.2)
    score = x @ truth
    return x, (rng.random(count) < expit(score - score.mean())).astype(float)


def hashed(words: np.ndarray) -> np.ndarray:
    return (words * 2654435761 % KEYS).astype(np.int32)


def occurring(x: csr_array) -> tuple[csr_array, torch.Tensor]:
    """The columns that are not empty, and their numbers."""
    places = np.unique(x.indices)
    return x[:, places], torch.from_numpy(places.astype(np.int64))


def objective(weight: np.ndarray) -> float:
    score = x @ weight
    return float(np.sum(np.logaddexp(0, score) - clicked * score) + args.l1 * abs(weight).sum())


def with_table(store: Store) -> Store:
    store.create("weights", KEYS, sparse=True, rule=f"proximal:l1={args.l1},adaptive")
    return store


def work(rank: int, cluster: Cluster) -> tuple[Savings, int, int]:
    """Runs one worker on its share of the documents. Returns what it has sent and saved."""
    share, places = occurring(x[rank :: args.workers])
    rows = keys[places]
    transposed = share.T.tocsr()
    filters = [f"kkt:l1={args.l1}"] if args.filter else []
    with with_table(connect(cluster.address, cluster.key_file, rank=rank)) as store:
        weights = Filtered(store, "weights", filters)
        for step in range(args.steps):
            weight = store.get("weights", rows=rows, staleness=0)  # waits for all workers
            error = expit(share @ weight[:, 0].double().numpy()) - clicked[rank :: args.workers]
            gradient = torch.from_numpy(transposed @ error) * args.workers  # as for all documents
            weights.push(rows, gradient, weight, rate=1 / args.workers / (1 + step / 40))
            store.tick()
        return weights.savings, store.bytes_sent, store.saved_key_bytes


x, clicked = documents(args.documents)
x, keys = occurring(x)
print(f"{args.documents} documents; {len(keys)} of {KEYS} keys occur")

with Cluster(servers=args.servers, workers=args.workers) as cluster:
    with ThreadPoolExecutor(args.workers) as pool:
        done = list(pool.map(work, range(args.workers), [cluster] * args.workers))
    with with_table(connect(cluster.address, cluster.key_file)) as store:
        weight = store.get("weights", rows=keys)[:, 0].double().numpy()

savings, sent, known = zip(*done, strict=True)
before, after = sum(s.bytes_offered for s in savings), sum(s.bytes_sent for s in savings)
print(f"pushed {after / 1e6:.3f} of {before / 1e6:.3f} MB: {before / after:.1f} times less")
print(f"sent {sum(sent) / 1e6:.2f} MB; row numbers that servers knew: {sum(known) / 1e6:.2f} MB")

solver = LogisticRegression(
    C=1 / args.l1, l1_ratio=1, solver="liblinear", fit_intercept=False, tol=1e-6
)
best = solver.fit(x, clicked).coef_[0]
ours, theirs = objective(weight), objective(best)
print(f"objective {ours:.2f}, scikit-learn's {theirs:.2f}: gap {100 * (ours / theirs - 1):.3f} %")
large, largest = abs(weight) > 0.01, abs(best) > 0.01
both = (large & largest).sum()
print(f"weights above 0.01: {large.sum()}, scikit-learn's {largest.sum()}, both {both}")

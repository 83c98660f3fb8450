"""L-BFGS for a network over a pool of processes, with its vectors on parameter servers.

    python examples/lbfgs.py                       two processes
    python examples/lbfgs.py --servers 2           the same, with the vectors on two servers

The loss is that of all rows in every iteration. Each worker takes one of 32 pieces of the rows when
it is done with the last. You can kill a worker while the example runs: another takes its piece, and
the result is the same. The data ship with scikit-learn: 1,797 images of 8×8 hand-written digits.
"""

import argparse
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import farandole as fd
from farandole.learn import LBFGS

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--servers", type=int, default=0, help="0: the vectors are in this process")
parser.add_argument("--iterations", type=int, default=60)
parser.add_argument("--verbose", action="store_true", help="show the progress")
args = parser.parse_args()

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
with fd.server.Cluster(servers=args.servers) if args.servers else nullcontext() as servers:
    optimizer = LBFGS(
        F.cross_entropy,
        model,
        pool=args.workers,
        servers=servers,
        weight_decay=1e-3,
        tolerance=1e-3,
        max_iter=args.iterations,
        verbose=args.verbose,
    ).fit(images[:1200], labels[:1200])

with torch.no_grad():
    accuracy = float((model(images[1200:]).argmax(1) == labels[1200:]).float().mean())
print(f"loss {optimizer.loss_:.6f} after {optimizer.n_iter_} iterations, accuracy {accuracy:.4f}")
print(str(optimizer.report_).splitlines()[-1])

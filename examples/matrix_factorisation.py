"""Matrix factorisation on parameter servers: workers exchange only the rows that they need.

    python examples/matrix_factorisation.py
    python examples/matrix_factorisation.py --users 100000 --items 20000 --workers 4 --servers 4

A rating is approximately the product of a user's factors and an item's factors. Both are tables on
the servers, which update them with Adagrad. Workers do not wait for each other: a batch uses few
rows, and two workers seldom use the same rows at the same time. A codec compresses the gradients.

Workers are threads here, because threads start fast. Each has its own store, as a process would.
"""

import argparse
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from farandole.server import Cluster, Store, connect

NOISE = 0.3  # standard deviation of a rating: no model can have a smaller error

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--users", type=int, default=2000)
parser.add_argument("--items", type=int, default=1000)
parser.add_argument("--ratings", type=int, default=60, help="ratings of each user")
parser.add_argument("--factors", type=int, default=5)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--batch", type=int, default=1000)
parser.add_argument("--rate", type=float, default=0.6)
parser.add_argument(
    "--codec",
    default="int8",
    help="codec of the gradients, such as bf16 or topk:ratio=0.1; empty for none",
)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--servers", type=int, default=2)
args = parser.parse_args()


class Ratings(NamedTuple):
    user: torch.Tensor
    item: torch.Tensor
    value: torch.Tensor

    def only(self, which: slice | torch.Tensor) -> "Ratings":
        return Ratings(*(part[which] for part in self))


def make_ratings() -> Ratings:
    """Ratings in random order."""
    torch.manual_seed(0)
    user = torch.randperm(args.users * args.ratings) % args.users
    item = torch.randint(args.items, user.shape)
    tastes, traits = (torch.randn(count, args.factors) for count in (args.users, args.items))
    value = product(tastes[user], traits[item])
    return Ratings(user, item, value + NOISE * torch.randn(value.shape))


def product(users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    return (users * items).sum(1) / args.factors**0.5


def with_tables(store: Store) -> Store:
    shape = {"width": args.factors, "sparse": True}
    store.create("users", args.users, rule="adagrad", codec=args.codec, **shape)
    store.create("items", args.items, rule="adagrad", codec=args.codec, **shape)
    return store


def step(store: Store, batch: Ratings) -> None:
    """Fetches and pushes only the rows of the batch's users and items, each once."""
    users, of_user = batch.user.unique(return_inverse=True)
    items, of_item = batch.item.unique(return_inverse=True)
    gets = [store.start_get("users", rows=users), store.start_get("items", rows=items)]
    p, q = (get.wait().requires_grad_() for get in gets)
    error = product(p[of_user], q[of_item]) - batch.value
    (0.5 * error.square().sum()).backward()
    pushes = [
        store.start_push("users", p.grad, rows=users, rate=args.rate),
        store.start_push("items", q.grad, rows=items, rate=args.rate),
    ]
    for push in pushes:
        push.wait()


def rmse(store: Store, held_out: Ratings) -> float:
    users, items = store.get("users"), store.get("items")
    error = product(users[held_out.user], items[held_out.item]) - held_out.value
    return float(error.square().mean().sqrt())


def work(rank: int, cluster: Cluster) -> int:
    """Runs one worker on its share of the ratings. Returns the number of bytes that it has sent."""
    share = training.only(slice(rank, None, args.workers))
    random = torch.Generator().manual_seed(rank)
    with with_tables(connect(cluster.address, cluster.key_file, rank=rank)) as store:
        for epoch in range(args.epochs):
            for index in torch.randperm(len(share.user), generator=random).split(args.batch):
                step(store, share.only(index))
            if rank == 0:
                print(f"epoch {epoch}: RMSE {rmse(store, held_out):.3f}", flush=True)
        return store.bytes_sent


ratings = make_ratings()
tenth = len(ratings.user) // 10
held_out, training = ratings.only(slice(tenth)), ratings.only(slice(tenth, None))
print(f"{len(training.user)} ratings by {args.users} users of {args.items} items; noise {NOISE}")

with (
    Cluster(servers=args.servers, workers=args.workers) as cluster,
    with_tables(connect(cluster.address, cluster.key_file)) as store,
):
    store.put("users", 0.5 * torch.randn(args.users, args.factors))
    store.put("items", 0.5 * torch.randn(args.items, args.factors))
    with ThreadPoolExecutor(args.workers) as pool:
        sent = list(pool.map(work, range(args.workers), [cluster] * args.workers))
    print(f"RMSE {rmse(store, held_out):.3f}; workers sent {sum(sent) / 1e6:.2f} MB")

"""Sandblaster L-BFGS: what slow and killed workers cost, and the time to a loss beside Downpour.

1. One of four workers is slowed ten times. A piece takes 10 ms (it sleeps, so that cores do not
   matter), and there are 96. Sides: nobody slowed; one slowed, with backups; one slowed, without
   backups; one slowed, with one piece for each worker and no backups, as in a plain all-reduce.
   Time per evaluation, medians, all sides in another order in each round.

   3.1 of 4 workers are left, so no scheme is below 4 / 3.1 = 1.29 of the undisturbed time. Without
   backups everybody waits for the piece that the slow worker began last: (31 + up to 10) / 24 = 1.3
   to 1.7 with so many pieces, and 10 with one piece each. It is the small pieces that save most.
2. Two of four workers get SIGKILL in the middle of an iteration: the result beside that without.
3. Time to a loss on Fashion-MNIST: Sandblaster on four workers, L-BFGS of torch in one process,
   Downpour on four workers and a server. Time counts from when the workers are ready.

    python benchmarks/sandblaster.py

Targets: with backups at most 1.3 of the undisturbed time, without backups and small pieces at least
2; after two kills the same parameters to 1e-10.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import save, spread
from fashion import read
from torch import nn

import farandole as fd
from farandole.learn import LBFGS
from farandole.learn.pools.processes import Processes
from farandole.server import Cluster

WORKERS = 4
SIDES = ("undisturbed", "backups", "no backups", "one piece each")


class Sleeping(nn.Module):
    """A linear model. A row takes `seconds`; ten times that in the process that took the mark."""

    def __init__(
        self, inner: nn.Module, seconds: float, mark: Path | None, slowdown: float
    ) -> None:
        super().__init__()
        self.inner = inner
        self.seconds, self.mark, self.slowdown = seconds, mark, slowdown
        self.parent = os.getpid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if os.getpid() != self.parent:
            time.sleep(self.seconds * len(x) * (self.slowdown if self._is_slow() else 1))
        found: torch.Tensor = self.inner(x)
        return found

    def _is_slow(self) -> bool:
        if self.mark is None:
            return False
        try:
            with self.mark.open("x") as file:  # the first one to come is the slow one
                file.write(str(os.getpid()))
        except FileExistsError:
            return self.mark.read_text() == str(os.getpid())
        return True


class Killing(nn.Module):
    """Kills two of the processes that compute it, in the third evaluation."""

    def __init__(self, inner: nn.Module, folder: Path, rows: int) -> None:
        super().__init__()
        self.inner, self.folder, self.rows = inner, folder, rows
        self.parent = os.getpid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if os.getpid() != self.parent and self._seen(len(x)) > 2.5 * self.rows:
            for number in range(2):
                try:
                    (self.folder / f"killed-{number}").touch(exist_ok=False)
                except FileExistsError:
                    continue
                os.kill(os.getpid(), signal.SIGKILL)
        found: torch.Tensor = self.inner(x)
        return found

    def _seen(self, rows: int) -> int:
        with (self.folder / "rows").open("ab") as file:
            file.write(b"." * rows)
            return file.tell()


def small_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(672, 20, generator=generator, dtype=torch.float64)
    return x, (x @ torch.randn(20, 5, generator=generator, dtype=torch.float64)).argmax(1)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(20, 5).double()


def fit(model: nn.Module, iterations: int, **options: Any) -> LBFGS:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is not meant to converge
        optimizer = LBFGS(F.cross_entropy, model, max_iter=iterations, tolerance=0.0, **options)
        return optimizer.fit(*small_data())


def slowed(args: argparse.Namespace, side: str) -> dict[str, Any]:
    """Seconds of each evaluation, without the first, in which processes start."""
    with tempfile.TemporaryDirectory() as folder:
        mark = None if side == "undisturbed" else Path(folder, "slow")
        rows = len(small_data()[0])
        model = Sleeping(small_model(), args.piece * args.pieces / rows, mark, args.slowdown)
        pool = Processes(WORKERS, backups=side in ("undisturbed", "backups"))
        pieces = WORKERS if side == "one piece each" else args.pieces
        found = fit(model, args.iterations, pool=pool, pieces=pieces)
    passes = found.report_.passes[1:]
    return {
        "side": side,
        "seconds": spread([each.seconds for each in passes])["median"],
        "backups": sum(each.counts.backups for each in passes),
        "evaluations": len(passes),
    }


def kills(args: argparse.Namespace) -> dict[str, Any]:
    """The largest difference of a parameter."""
    models = [small_model(), small_model()]
    fit(models[0], args.iterations, pool=WORKERS)
    with tempfile.TemporaryDirectory() as folder:
        wrapped = Killing(models[1], Path(folder), len(small_data()[0]))
        found = fit(wrapped, args.iterations, pool=WORKERS)
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    return {
        "difference": max(float((a - b).detach().abs().max()) for a, b in pairs),
        "killed": sum(each.counts.losses for each in found.report_.passes),
    }


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.Tanh(), nn.Linear(64, 10))


def rows_of(args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = read(args.data, "train").tensors
    return x[: args.rows], y[: args.rows]


def sandblaster(args: argparse.Namespace) -> list[tuple[float, float]]:
    x, y = rows_of(args)
    with Cluster(servers=args.servers) as cluster, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = LBFGS(
            F.cross_entropy,
            network(),
            pool=WORKERS,
            servers=cluster,
            max_iter=args.curve_iterations,
            tolerance=0.0,
        ).fit(x, y)
    seconds, curve = 0.0, []
    for each in found.report_.passes[1:]:
        seconds += each.seconds
        curve.append(seconds)
    # An iteration may have taken several evaluations: it is counted at the end of its share.
    shares = [round((at + 1) * len(curve) / found.n_iter_) - 1 for at in range(found.n_iter_)]
    return [(curve[at], loss) for at, loss in zip(shares, found.losses_[1:], strict=True)]


def serial(args: argparse.Namespace) -> list[tuple[float, float]]:
    x, y = rows_of(args)
    model = network()
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=1, history_size=10, line_search_fn="strong_wolfe"
    )
    times, losses = [], []
    began = time.monotonic()
    for _ in range(args.curve_iterations + 1):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())  # the loss before the step
        times.append(time.monotonic() - began)
    return list(zip(times, losses[1:], strict=False))


def downpour_worker(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    run = fd.init(seed=0)
    x, y = rows_of(args)
    plain = network()
    model, optimizer = run.distribute(
        plain, torch.optim.SGD(plain.parameters(), args.rate), sync=fd.Downpour(push=2, fetch=2)
    )
    draw = torch.Generator().manual_seed(run.rank)
    run.group.barrier()
    began, curve, measured = time.monotonic(), [], 0.0
    while time.monotonic() - began - measured < args.curve_seconds:
        for _ in range(20):
            batch = torch.randint(len(y), (args.batch,), generator=draw)
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        if run.rank == 0:
            now = time.monotonic()
            with torch.no_grad():
                curve.append((now - began - measured, float(F.cross_entropy(model(x), y))))
            measured += time.monotonic() - now
    if run.rank == 0:
        Path(args.out).write_text(json.dumps(curve))


def downpour(args: argparse.Namespace) -> list[tuple[float, float]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "curve.json")
        command = [sys.executable, "-m", "farandole", "run", "-n", str(WORKERS)]
        command += ["--servers", str(args.servers), __file__, "--out", str(out)]
        for option in ("data", "rows", "rate", "batch", "curve-seconds"):
            command += [f"--{option}", str(getattr(args, option.replace("-", "_")))]
        subprocess.run(command, check=True, cwd=folder)
        return [(when, loss) for when, loss in json.loads(out.read_text())]


def seconds_to(curve: list[tuple[float, float]], target: float) -> float | None:
    return next((when for when, loss in curve if loss <= target), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--piece", type=float, default=0.01, help="seconds of a piece")
    parser.add_argument("--pieces", type=int, default=96)
    parser.add_argument("--slowdown", type=float, default=10.0)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--curve-iterations", type=int, default=60)
    parser.add_argument("--curve-seconds", type=float, default=30.0)
    parser.add_argument("--target", type=float, default=0.4, help="the loss on all rows")
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--no-curves", action="store_true")
    parser.add_argument("--name", default="sandblaster")
    parser.add_argument("--folder", type=Path, help="for the result, if not benchmarks/results")
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.out:
        downpour_worker(args)
        return
    runs = []
    for turn in range(args.rounds):
        order = list(SIDES)
        random.Random(turn).shuffle(order)
        for side in order:
            runs.append(slowed(args, side))
            print(json.dumps(runs[-1]), flush=True)
    killed = kills(args)
    print(json.dumps(killed), flush=True)
    curves = {}
    for side in () if args.no_curves else (sandblaster, serial, downpour):
        curves[side.__name__] = side(args)
        when = seconds_to(curves[side.__name__], args.target)
        print(f"{side.__name__}: loss {args.target} after {when} s", flush=True)
    medians = {
        side: spread([run["seconds"] for run in runs if run["side"] == side])["median"]
        for side in SIDES
    }
    ratios = {side: medians[side] / medians["undisturbed"] for side in SIDES[1:]}
    result = {
        "settings": {key: str(value) for key, value in vars(args).items()},
        "ratios": ratios,
        "killed": killed,
        "seconds_to_target": {side: seconds_to(c, args.target) for side, c in curves.items()},
        "curves": curves,
        "runs": runs,
    }
    save(args.name, result, *([args.folder] if args.folder else []))
    print(f"two of {WORKERS} workers killed: parameters differ by {killed['difference']:.1e}")
    for side, ratio in ratios.items():
        print(f"one of {WORKERS} slowed {args.slowdown:g} ×, {side}: {ratio:.2f} of the time")


if __name__ == "__main__":
    main()

"""Planned pipelines against data parallelism, by time to accuracy, where averaging is slow.

A network in the manner of VGG, most of its activations in convolutions and most of its weights in
fully connected layers, learns Fashion-MNIST on two hosts of two workers with a slow link between
them: under allreduce, and in the stages that the planner chooses for PipeDream and for synchronous
1F1B. Every update is of the same number of samples and at the same learning rate. The usual way out
for allreduce is a larger batch, so it gets that too. After every pass over some samples, with
nothing left in a pipeline, the clock stops and the test accuracy is taken. Target: what the planner
chose is there in half of allreduce's time. It is a fair question only where communication takes
more than 70 % of allreduce's step: this is measured first, and --rate moves it.

Then, what stashing weights is worth: a deep and narrow network in four stages, where updates come
between a forward and its backward, with stashed weights, with the same version in all stages
(`vertical`), with none (`stash=false`), and without any staleness (1F1B): accuracy after the same
number of steps. Needs root.

    sudo python benchmarks/pipedream.py
"""

from __future__ import annotations

import argparse
import gc
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import emulated
import torch
import torch.nn.functional as F
from emulated import Target
from fashion import read
from pipelines import new_run
from sides import ALLREDUCE, Clock, Side, communication, rotated
from torch import nn
from torch.utils.data import TensorDataset

import farandole as fd

LEAST_SHARE, LARGEST_RATIO = 0.7, 0.5
PLANNED = {
    "planned pipedream": "stages=auto,schedule=pipedream",
    "planned 1f1b": "stages=auto,microbatches=4,schedule=1f1b",
}
LARGER = 4  # times the batch, for allreduce's other chance
EVENLY = "stages=4,balance=5+4+4+3"
_EVALUATION_BATCH = 500


class Contender(NamedTuple):
    """How to train: `layout` None is allreduce of the whole model."""

    layout: str | None
    batch: int
    learning_rate: float
    momentum: float = 0.9


def contenders(
    world: fd.Run, args: argparse.Namespace, data: TensorDataset
) -> dict[str, Contender]:
    """*Together.* With the planner's choices, made once."""
    rate = args.learning_rate
    sides = {ALLREDUCE: Contender(None, args.batch, rate)}
    for name, layout in PLANNED.items():
        chosen = plan(world, args, Contender(layout, args.batch, rate), data)
        # A step of pipedream is one batch, and each rank of a stage brings its own to an update.
        in_an_update = max(chosen.replicas, default=1) if chosen.streams else 1
        sides[name] = Contender(str(chosen), args.batch // in_an_update, rate)
    sides[f"{ALLREDUCE}, {LARGER} times the batch"] = Contender(
        None, LARGER * args.batch, args.larger_learning_rate
    )
    return sides


def plan(
    world: fd.Run, args: argparse.Namespace, contender: Contender, data: TensorDataset
) -> fd.Layout:
    sample = data.tensors[0][: args.batch]
    racer = Race(world, vgg_like(args.width), contender, 0, sample)
    chosen = racer.trainer.layout
    assert chosen is not None
    racer.close()
    return chosen


def vgg_like(width: int) -> nn.Sequential:
    return _initialised(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )


def deep_and_narrow(width: int) -> nn.Sequential:
    """Eight layers; `EVENLY` cuts it into two of them for each stage."""
    widths = [784, *[width] * 7]
    layers = [[nn.Linear(*sizes), nn.ReLU()] for sizes in pairwise(widths)]
    return _initialised(nn.Flatten(), *chain.from_iterable(layers), nn.Linear(width, 10))


def _initialised(*layers: nn.Module) -> nn.Sequential:
    """He et al. 2015, also for linear layers: without it the first epochs are spent on scales."""
    for layer in layers:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


class Race:
    """One model under one layout, and its run."""

    def __init__(
        self, world: fd.Run, model: nn.Module, contender: Contender, seed: int, sample: Any = None
    ) -> None:
        self.run = new_run(world, seed)
        self.trainer = self.run.trainer(
            model,
            F.cross_entropy,
            lambda weights: torch.optim.SGD(
                weights, contender.learning_rate, momentum=contender.momentum
            ),
            layout=contender.layout,
            sample=sample,
            check=False,  # what is measured is training
        )
        self._batch = contender.batch

    def train(self, data: TensorDataset) -> None:
        """One pass; when it ends, nothing is under way."""
        for x, y in self.trainer.loader(data, global_batch_size=self._batch, drop_last=True):
            self.trainer.step(x, y)

    def accuracy(self, data: TensorDataset) -> float:
        """*Together.* In percent; the same on all ranks."""
        x, y = (tensor.split(_EVALUATION_BATCH) for tensor in data.tensors)
        correct = sum(
            int((self.trainer.predict(images).argmax(1) == labels).sum())
            for images, labels in zip(x, y, strict=True)
        )
        return self.run.mean(100 * correct / len(data))

    def close(self) -> None:
        self.run.close()
        gc.collect()  # what it held goes back now, not while the next one is timed


def race(
    world: fd.Run,
    args: argparse.Namespace,
    name: str,
    contender: Contender,
    seed: int,
    passes: list[TensorDataset],
    test: TensorDataset,
) -> dict[str, Any]:
    """Until the target is reached, or the passes are over."""
    torch.manual_seed(seed)
    racer = Race(world, vgg_like(args.width), contender, seed)
    curve = []
    clock = Clock(world.group)
    for number, data in enumerate(passes, start=1):
        racer.train(data)
        with clock.paused():
            accuracy = racer.accuracy(test)
            curve.append({"seconds": clock.seconds, "accuracy": accuracy})
            world.print(
                f"seed {seed}, {name}, pass {number}: {accuracy:.2f} % after {clock.seconds:.1f} s"
            )
        if accuracy >= args.target:
            break
    racer.close()
    samples = len(curve) * args.pass_samples
    return {
        "layout": contender.layout,
        "batch": contender.batch,
        "learning_rate": contender.learning_rate,
        "passes": curve,
        "seconds_to_target": curve[-1]["seconds"] if accuracy >= args.target else None,
        "samples_per_second": samples / clock.seconds,
        "link_bytes_per_sample": clock.link_bytes / samples,
    }


def share_of_communication(
    world: fd.Run, args: argparse.Namespace, data: TensorDataset
) -> dict[str, float]:
    torch.manual_seed(0)
    model = vgg_like(args.width)
    opt = torch.optim.SGD(model.parameters(), args.learning_rate, momentum=0.9)
    x, y = data[: args.batch // world.size]
    found = communication(Side(world, ALLREDUCE, model, opt), x, y, steps=2, blocks=3)
    world.print(
        f"{ALLREDUCE}: a step takes {found['step_ms']:.0f} ms, without communication "
        f"{found['compute_ms']:.0f}: {found['share']:.0%} of it is communication"
    )
    return found


def stashing(
    world: fd.Run, args: argparse.Namespace, data: TensorDataset, test: TensorDataset
) -> dict[str, dict[str, dict[str, float]]]:
    """By learning rate, the way that weights are kept, and seed: the accuracy in the end.

    Without momentum, which makes old gradients last longer than any pipeline does.
    """
    sides = {
        "1f1b, no staleness": f"{EVENLY},schedule=1f1b",
        "stashed": f"{EVENLY},schedule=pipedream",
        "vertical": f"{EVENLY},schedule=pipedream,vertical",
        "none": f"{EVENLY},schedule=pipedream,stash=false",
    }
    found: dict[str, dict[str, dict[str, float]]] = {}
    for rate in args.stash_learning_rates:
        by_side = found[f"{rate:g}"] = {name: {} for name in sides}
        for turn, seed in enumerate(args.stash_seeds):
            for name, layout in rotated(list(sides.items()), turn):
                torch.manual_seed(seed)
                contender = Contender(layout, args.stash_batch, rate, momentum=0.0)
                racer = Race(world, deep_and_narrow(args.stash_width), contender, seed)
                for _ in range(args.stash_epochs):
                    racer.train(data)
                by_side[name][str(seed)] = racer.accuracy(test)
                racer.close()
    return found


def work(world: fd.Run, args: argparse.Namespace) -> dict[str, Any]:
    test = read(args.data, "t10k", args.test_samples)
    whole = read(args.data, "train", args.passes * args.pass_samples)
    x, y = (tensor.split(args.pass_samples) for tensor in whole.tensors)
    passes = [TensorDataset(*part) for part in zip(x, y, strict=True)]
    share = share_of_communication(world, args, passes[0])
    sides = contenders(world, args, passes[0])
    seeds = {
        str(seed): {
            name: race(world, args, name, sides[name], seed, passes, test)
            for name in rotated(list(sides), turn)
        }
        for turn, seed in enumerate(args.seeds)
    }
    data = read(args.data, "train", args.stash_samples)
    return {
        "communication": share,
        "seeds": seeds,
        "stashing": stashing(world, args, data, test),
    }


def judged(found: dict[str, Any]) -> dict[str, Any]:
    """Everybody's time to the target over allreduce's: by seed, and the median."""
    against: dict[str, Any] = {}
    for name in next(iter(found["seeds"].values())):
        ratios = {}
        for seed, sides in found["seeds"].items():
            ours, theirs = (sides[each]["seconds_to_target"] for each in (name, ALLREDUCE))
            ratios[seed] = None if ours is None or theirs is None else ours / theirs
        known = [ratio for ratio in ratios.values() if ratio is not None]
        middle = median(known) if len(known) == len(ratios) else None
        against[name] = {"by_seed": ratios, "median": middle}
    return {**found, "time_over_allreduce": against}


def show(args: argparse.Namespace, result: dict[str, Any]) -> None:
    share = result["communication"]["share"]
    fits = "as wanted" if share > LEAST_SHARE else "lower --rate"
    print(f"share of communication in a step: {share:.2f} (wanted above {LEAST_SHARE}: {fits})")
    for seed, sides in result["seeds"].items():
        for name, side in sides.items():
            reached = side["seconds_to_target"]
            when = "never" if reached is None else f"after {reached:.1f} s"
            print(
                f"seed {seed}, {name}: {args.target:g} % {when}; "
                f"{side['samples_per_second']:.0f} samples/s, "
                f"{side['link_bytes_per_sample'] / 1e3:.1f} kB a sample over a host's link; "
                f"layout {side['layout'] or 'whole'}, batch {side['batch']}"
            )
    for rate, by_side in result["stashing"].items():
        print(f"accuracy in % after the same steps at learning rate {rate}, by seed:")
        for name, by_seed in by_side.items():
            cells = "  ".join(f"{accuracy:5.2f}" for accuracy in by_seed.values())
            print(f"  {name:<20} {cells}   median {median(by_seed.values()):5.2f}")
    for name, against in result["time_over_allreduce"].items():
        middle = against["median"]
        text = "never reached" if middle is None else f"{middle:.3f}"
        print(f"time to {args.target:g} %, {name} / {ALLREDUCE}: {text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    emulated.add_options(parser, rate="200mbit", workers_per_host=2, save_as="pipedream")
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--width", type=int, default=1024, help="of the fully connected layers")
    parser.add_argument("--batch", type=int, default=128, help="of each update, all workers'")
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--larger-learning-rate", type=float, default=0.04)
    parser.add_argument("--target", type=float, default=82.0, help="accuracy in percent")
    parser.add_argument("--pass-samples", type=int, default=2560)
    parser.add_argument("--passes", type=int, default=16, help="at most")
    parser.add_argument("--test-samples", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--stash-width", type=int, default=64)
    parser.add_argument("--stash-batch", type=int, default=32)
    parser.add_argument("--stash-learning-rates", type=float, nargs="+", default=[0.05, 0.1])
    parser.add_argument("--stash-samples", type=int, default=6400)
    parser.add_argument("--stash-epochs", type=int, default=1)
    parser.add_argument("--stash-seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    result = judged(emulated.on_hosts(args, work))
    show(args, result)
    targets = [
        Target(
            f"ratio {name} / {ALLREDUCE}, time to {args.target:g} %",
            result["time_over_allreduce"][name]["median"],
            LARGEST_RATIO,
        )
        for name in PLANNED
    ]
    emulated.keep(args, result, targets)


if __name__ == "__main__":
    main()

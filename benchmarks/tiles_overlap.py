"""Does the exchange of halos hide behind computing? Tiles with `overlap` against tiles without.

With it a convolution computes the inside of its tile while the halo is on the way, and the border
when it has come. Both sides train the same model in the same processes, one step each in turn, and
exchange for every layer (`halo=1`). Beside the seconds a step there is the time that a rank waited
for other tiles. The first model has nothing but convolutions, so that halos are all that is waited
for; in a ResNet ranks also wait for each other's BatchNorm statistics, on both sides alike.

Over shared memory; or, with `--emulate 1gbit`, between two emulated hosts that each have half of
the tiles, which needs root.

    python benchmarks/tiles_overlap.py
    python benchmarks/tiles_overlap.py --emulate 1gbit
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, save, spread
from emulated import HOSTS, on_hosts
from sides import rotated, timed
from tiled import Side, on_cores

import farandole as fd
from farandole.train.engines.pipelined import PipelinedEngine

MODELS = ("convolutions:layers=12,width=32", "resnet110_v2:units=2")
SIDES = {"overlap": "overlap=true", "no overlap": "overlap=false"}
WARM_UP_STEPS = 3
"""In the first two layers are timed."""
TIMEOUT_SECONDS = 600.0


class Waiting:
    """What a rank waits for the other tiles: in all exchanges of its shards."""

    def __init__(self, side: Side) -> None:
        self.seconds = 0.0
        engine = side.trainer._engine
        assert isinstance(engine, PipelinedEngine)
        for tiling in engine._tilings.values():
            self._watch(tiling.flow.shards)

    def _watch(self, shards: Any) -> None:
        take = shards.take

        def timed_take(shard: int, number: int, back: bool) -> list[torch.Tensor]:
            begin = time.perf_counter()
            try:
                found: list[torch.Tensor] = take(shard, number, back)
                return found
            finally:
                self.seconds += time.perf_counter() - begin

        shards.take = timed_take


def work(world: fd.Run, args: argparse.Namespace) -> dict[str, Any]:
    """What rank 0 has found, on every rank."""
    return {model: measure(world, args, model) for model in args.models}


def measure(world: fd.Run, args: argparse.Namespace, model: str) -> dict[str, Any]:
    sides = {
        name: Side(world, model, f"tiles={args.tiles},halo=1,{option}", args.size, args.batch)
        for name, option in SIDES.items()
    }
    losses: dict[str, list[float]] = {}
    for name, side in sides.items():
        losses[name] = [side.step() for _ in range(WARM_UP_STEPS)]
    waiting = {name: Waiting(side) for name, side in sides.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    waited: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(args.repeats):
        for name, side in rotated(list(sides.items()), turn):
            before = waiting[name].seconds
            seconds[name].append(timed(world.group, side.work))
            waited[name].append(world.mean(waiting[name].seconds - before))
    with_it, without = SIDES
    found: dict[str, Any] = {
        name: {
            "step_seconds": spread(seconds[name]),
            "waited_seconds_of_a_rank": spread(waited[name]),
            "waited_share": spread(waited[name])["median"] / spread(seconds[name])["median"],
            "losses": losses[name],
        }
        for name in sides
    }
    steps = zip(seconds[without], seconds[with_it], strict=True)
    waits = zip(waited[with_it], waited[without], strict=True)
    found["speed_up"] = spread([a / b for a, b in steps])
    found["wait_left"] = spread([a / b for a, b in waits])
    for side in sides.values():
        side.close()
    world.print(_told(model, found))
    return found


def _told(model: str, found: dict[str, Any]) -> str:
    return "\n".join(
        f"{model}, {name}: {1000 * found[name]['step_seconds']['median']:.1f} ms a step, of which "
        f"a rank waits {1000 * found[name]['waited_seconds_of_a_rank']['median']:.1f} ms for others"
        for name in SIDES
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS, help="see benchmarks/tiled.py")
    parser.add_argument("--tiles", default="2x2", help="a grid with an even number of tiles")
    parser.add_argument("--size", type=int, default=512, help="of the images, pixels a side")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--emulate", metavar="RATE", help="of the links of two emulated hosts")
    parser.add_argument("--save", metavar="NAME", help="of the result file")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="and its folder")
    args = parser.parse_args()
    rows, columns = map(int, args.tiles.split("x"))
    if args.emulate:
        args.rate, args.workers_per_host = args.emulate, rows * columns // HOSTS
        found = on_hosts(args, work)
    else:
        on_cores(rows * columns)
        world = fd.init(timeout=TIMEOUT_SECONDS)
        found = work(world, args)
        if world.rank > 0:
            return
    left_out = ("out", "save", "models", "rate", "workers_per_host")
    settings = {name: value for name, value in vars(args).items() if name not in left_out}
    name = args.save or ("tiles_overlap_emulated" if args.emulate else "tiles_overlap")
    save(name, {"settings": settings, "models": found}, args.out)
    for model, result in found.items():
        print(
            f"ratio no overlap / overlap, {model}: {result['speed_up']['median']:.3f} in seconds a "
            f"step; {result['wait_left']['median']:.3f} of the waiting is left"
        )


if __name__ == "__main__":
    main()

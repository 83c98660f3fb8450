"""How fast are tiles? Against layer parallelism and a pipeline, on the same ranks and large images.

All sides train the same model in the same processes, one step each in turn, in another order every
round; each rank has its share of the cores. Layer parallelism has one rank at work at a time, a
pipeline fills and drains, tiles work all the time and exchange halos. Published (Hy-Fi, ISC 2022):
up to 2.67 times as fast as layer parallelism, and 1.68 times as a pipeline.

Then tiles of a 2x2 grid alone: neighbours exchange for every layer, for groups of 2 and 4, or for
as many as was found to be fastest.

Sides without micro-batches compute the same, and so have the same losses before and after an
update, but for how float32 rounds. With BatchNorm micro-batches have others.

    python benchmarks/tiles_speed.py --workers 4
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from common import RESULTS, save, spread
from sides import rotated, timed
from tiled import Side, on_cores

import farandole as fd
from farandole.layout import parse_layout

MODELS = ("resnet110_v2:units=1", "amoebanet_d:layers=3,filters=64")
LAYER, PIPELINE = "layer", "pipeline"
HALOS = ("1", "2", "4", "auto")
MEASURED_STEPS = 2
"""In the first steps of a layout activations are counted, and of tiles layers are timed."""
TIMEOUT_SECONDS = 600.0
PUBLISHED = {"over_layer": 2.67, "over_pipeline": 1.68}


def sides_of(workers: int, micros: int) -> dict[str, str]:
    """Layouts of so many ranks, by name."""
    half = workers // 2
    micro = f"microbatches={micros}"
    return {
        LAYER: f"stages={workers},schedule=layer",
        PIPELINE: f"stages={workers},{micro},schedule=1f1b",
        "tiles, square": f"tiles=2x{half}",
        "tiles, rows": f"tiles={workers}x1",
        "tiles × stages": f"tiles={half}x1,stages=2,{micro}",
        "tiles × stages, both ways": f"tiles={half}x1,stages=2,{micro},bidirectional",
    }


def halos_of(workers: int) -> dict[str, str]:
    return {f"halo={halo}": f"tiles=2x{workers // 2},halo={halo}" for halo in HALOS}


def measure(
    world: fd.Run, args: argparse.Namespace, model: str, layouts: dict[str, str]
) -> dict[str, Any]:
    """Seconds a step of every side, and what each rank waited and sent."""
    balances: dict[tuple[int, bool], tuple[int, ...]] = {}  # sides that are cut alike share it
    sides: dict[str, Side] = {}
    losses: dict[str, list[float]] = {}
    for name, text in layouts.items():
        layout = parse_layout(text)
        assert layout.stages != "auto"
        kind = layout.stages, layout.shards > 1
        side = Side(world, model, text, args.size, args.batch, balance=balances.get(kind, ()))
        balances[kind] = side.balance
        sides[name] = side
        # One more with tiles: it is the first with halos as chosen.
        losses[name] = [side.step() for _ in range(MEASURED_STEPS + (layout.shards > 1))]
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    waited: dict[str, list[float]] = {name: [] for name in sides}
    sent: dict[str, float] = {}
    meter = world.group.meter
    begin = time.monotonic()
    for turn in range(args.repeats):
        if world.group.broadcast_json(turn > 0 and time.monotonic() - begin > args.budget):
            break
        for name, side in rotated(list(sides.items()), turn):
            wait_before, sent_before = meter.waited_seconds, meter.bytes_sent
            seconds[name].append(timed(world.group, side.work))
            waited[name].append(world.mean(meter.waited_seconds - wait_before))
            sent[name] = world.mean(float(meter.bytes_sent - sent_before))
    found: dict[str, Any] = {}
    for name, side in sides.items():
        found[name] = {
            "layout": str(side.trainer.layout),
            "step_seconds": spread(seconds[name]),
            "images_per_second": args.batch / spread(seconds[name])["median"],
            "waited_seconds_of_a_rank": spread(waited[name])["median"],
            "bytes_sent_of_a_rank": sent[name],
            "losses": losses[name],
            "rounds": len(seconds[name]),
        }
        for other in (LAYER, PIPELINE, f"halo={HALOS[0]}"):
            if other in seconds:
                pairs = zip(seconds[other], seconds[name], strict=True)
                found[name][f"over_{other}"] = spread([a / b for a, b in pairs])
        side.close()
    alike = [name for name, text in layouts.items() if parse_layout(text).microbatches == 1]
    for name in alike:
        pairs = zip(losses[name][:MEASURED_STEPS], losses[alike[0]], strict=False)
        found[name]["loss_difference"] = max(abs(a / b - 1) for a, b in pairs)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", "--workers", type=int, default=4, help="an even number")
    parser.add_argument("--models", nargs="+", default=MODELS, help="see benchmarks/tiled.py")
    parser.add_argument("--size", type=int, default=2048, help="of the images, pixels a side")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=4, help="an even number")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--budget", type=float, default=240.0, help="seconds; no round begins after them"
    )
    parser.add_argument(
        "--parts", nargs="+", choices=("layouts", "halos"), default=["layouts", "halos"]
    )
    parser.add_argument("--save", default="tiles_speed", metavar="NAME", help="of the result file")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="and its folder")
    args = parser.parse_args()
    if args.workers < 4 or args.workers % 2:
        parser.error(f"--workers {args.workers}: take an even number from 4 on")
    on_cores(args.workers)
    world = fd.init(timeout=TIMEOUT_SECONDS)
    parts = {
        "layouts": sides_of(args.workers, args.microbatches),
        "halos": halos_of(args.workers),
    }
    found: dict[str, dict[str, Any]] = {}
    for model in args.models:
        found[model] = {}
        for part in args.parts:
            found[model][part] = measure(world, args, model, parts[part])
            if world.rank == 0:
                show(model, found[model][part])
                conclude(args, found)


def show(model: str, sides: dict[str, Any]) -> None:
    for name, side in sides.items():
        ratios = [
            f"{value['median']:.2f} × {key.removeprefix('over_')}"
            for key, value in side.items()
            if key.startswith("over_")
        ]
        print(
            f"{model}, {name}: {side['step_seconds']['median']:.2f} s a step "
            f"({', '.join(ratios)}), a rank waited {side['waited_seconds_of_a_rank']:.2f} s and "
            f"sent {side['bytes_sent_of_a_rank'] / 1e6:.1f} MB",
            flush=True,
        )


def conclude(args: argparse.Namespace, found: dict[str, dict[str, Any]]) -> None:
    settings = {
        name: value for name, value in vars(args).items() if name not in ("out", "save", "models")
    }
    best: dict[str, dict[str, float]] = {}
    for model, parts in found.items():
        tiled = {
            name: side
            for name, side in parts.get("layouts", {}).items()
            if name.startswith("tiles")
        }
        if tiled:
            best[model] = {
                over: max(side[over]["median"] for side in tiled.values()) for over in PUBLISHED
            }
    result = {"settings": settings, "models": found, "best": best, "published_up_to": PUBLISHED}
    save(args.save, result, args.out)
    differences = [
        side["loss_difference"]
        for parts in found.values()
        for sides in parts.values()
        for side in sides.values()
        if "loss_difference" in side
    ]
    print(f"losses that should be the same differ by up to {max(differences):.1e}")
    for model, parts in found.items():
        for name, side in parts.get("halos", {}).items():
            print(f"ratio halo=1 / {name}, {model}: {side['over_halo=1']['median']:.3f}")
    for model, ratios in best.items():
        told = ", ".join(
            f"{name.replace('_', ' ')} {ratio:.3f} (published: up to {PUBLISHED[name]})"
            for name, ratio in ratios.items()
        )
        print(f"ratio of the best with tiles, {model}: {told}")


if __name__ == "__main__":
    main()

"""GEMS against layer parallelism: what two directions gain on stages that sleep, and what is held.

Four ranks, stages of 30 ms forward and 60 ms backward. The same micro-batches pass one after the
other (`layer`), and in pairs of opposite directions with one update at the end (MASTER, `gems`),
taking turns. With k pairs for ever the gain is 3p/(2p + 1), where a backward takes two forwards; a
step of few pairs has a beginning and an end, and the simulator says what is left. Targets: at least
0.9 of the ideal gain at the most pairs; never more activations at once than the schedule says.

For information, GPipe with two micro-batches at a time in each direction.

    python benchmarks/gems.py
"""

from __future__ import annotations

import argparse
from typing import Any

import pipelines
from common import restart_on_workers, save, spread
from pipelines import Sleepers
from sides import rotated, timed

import farandole as fd
from farandole.schedule.pipelines import Costs, facts, simulate

RANKS = 4
SHARE_WANTED = 0.9
MICROS_OF_GPIPE = 2
LAYER = "layer"


def sides_of(pairs: int) -> dict[str, fd.Layout]:
    """All of them work on 2 × `pairs` micro-batches, or gpipe on twice as many."""
    layer = fd.Layout(stages=RANKS, schedule="layer")
    gems = fd.Layout(stages=RANKS, schedule="gems", microbatches=2 * pairs)
    both_ways = fd.Layout(
        stages=RANKS,
        schedule="gpipe",
        microbatches=2 * pairs * MICROS_OF_GPIPE,
        bidirectional=True,
        pairs=pairs,
    )
    return {LAYER: layer, "gems": gems, "gpipe both ways": both_ways}


def measure(world: fd.Run, args: argparse.Namespace, pairs: int) -> dict[str, Any]:
    forward, backward = pipelines.seconds_of(args)
    layouts = sides_of(pairs)
    sides = {name: Sleepers(world, layout, forward, backward) for name, layout in layouts.items()}
    for side in sides.values():
        side.step(side.layout.microbatches)
        side.ledger.restart()

    def work(side: Sleepers) -> None:
        """One sample is one micro-batch; layer has one of them in a step."""
        for _ in range(2 * pairs if side is sides[LAYER] else 1):
            side.step(side.layout.microbatches)

    # By micro-batch: gpipe has more of them.
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(args.repeats):
        for name, side in rotated(list(sides.items()), turn):
            micros = max(2 * pairs, side.layout.microbatches)
            seconds[name].append(timed(world.group, lambda side=side: work(side)) / micros)

    ideal = 3 * RANKS / (2 * RANKS + 1)
    alone = RANKS * (forward + backward)
    found: dict[str, Any] = {}
    for name, side in sides.items():
        pipeline = side.layout.pipeline()
        played = simulate(pipeline, Costs.even(RANKS, forward, backward)).seconds
        predicted = alone / (played / pipeline.micros)
        gain = spread([a / b for a, b in zip(seconds[LAYER], seconds[name], strict=True)])
        found[name] = {
            "layout": str(layouts[name]),
            "milliseconds_by_micro_batch": 1000 * spread(seconds[name])["median"],
            "gain_over_layer": gain,
            "share_of_simulated": gain["median"] / predicted,
            "simulated_gain": predicted,
            "activations_held": side.peaks(),
            "activations_predicted": list(facts(pipeline).activations),
        }
        side.close()
    found["gems"]["share_of_ideal"] = found["gems"]["gain_over_layer"]["median"] / ideal
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    pipelines.add_options(parser, forward_ms=30, repeats=5, save_as="gems")
    parser.add_argument("--pairs", type=int, nargs="+", default=[1, 2, 4])
    args = parser.parse_args()
    restart_on_workers(RANKS)
    world = fd.init()
    found = {str(pairs): measure(world, args, pairs) for pairs in args.pairs}
    if world.rank == 0:
        show(args, found)


def show(args: argparse.Namespace, found: dict[str, dict[str, Any]]) -> None:
    forward, backward = pipelines.seconds_of(args)
    most = found[str(max(args.pairs))]["gems"]
    as_predicted = all(
        side["activations_held"] == side["activations_predicted"]
        for sides in found.values()
        for side in sides.values()
    )
    result = {
        "ranks": RANKS,
        "forward_ms": 1000 * forward,
        "backward_ms": 1000 * backward,
        "repeats": args.repeats,
        "ideal_gain": 3 * RANKS / (2 * RANKS + 1),
        "pairs": found,
        "target": {"share_of_ideal_at_least": SHARE_WANTED, "activations": "as predicted"},
        "met": most["share_of_ideal"] >= SHARE_WANTED and as_predicted,
    }
    save(args.save, result, args.out)
    for pairs, sides in found.items():
        for name, side in sides.items():
            print(
                f"{pairs} pair(s), {name}: {side['milliseconds_by_micro_batch']:.1f} ms by "
                f"micro-batch, {side['gain_over_layer']['median']:.3f} × layer (simulated "
                f"{side['simulated_gain']:.3f}), activations held {side['activations_held']}, "
                f"predicted {side['activations_predicted']}"
            )
    print(f"activations {'as' if as_predicted else 'NOT as'} predicted")
    print(f"target: {SHARE_WANTED} of the ideal gain {result['ideal_gain']:.3f} at most pairs")
    for pairs, sides in found.items():
        gems = sides["gems"]
        print(
            f"ratio layer / gems, {pairs} pair(s): {gems['gain_over_layer']['median']:.3f}, "
            f"{gems['share_of_ideal']:.3f} of the ideal, {gems['share_of_simulated']:.3f} of the "
            "simulated"
        )


if __name__ == "__main__":
    main()

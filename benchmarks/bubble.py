"""How long do ranks wait in a pipeline? The idle share of stages that sleep, against the formula.

Four ranks of 60 ms forward and 120 ms backward, 4, 8 and 16 micro-batches: long enough that what an
action takes beside its sleep, about 1 ms, does not hide the schedule. Idle is what a rank does not
sleep of a step, over all ranks, from the start that all wait for to the end of the slowest. The
textbook has (p − 1)/(m + p − 1) for GPipe and 1F1B. Target: within 10 % of it. Interleaved 1F1B and
zero-bubble, for which the simulator predicts, are there for information. All take turns.

    python benchmarks/bubble.py
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
CHUNKS = 2
LARGEST_DIFFERENCE = 0.10
BY_FORMULA = ("gpipe", "1f1b")


def layouts(micros: int) -> dict[str, fd.Layout]:
    flushed = {
        name: fd.Layout(stages=RANKS, microbatches=micros, schedule=name)
        for name in (*BY_FORMULA, "zero-bubble")
    }
    interleaved = fd.Layout(
        stages=CHUNKS * RANKS, microbatches=micros, schedule="interleaved", chunks=CHUNKS
    )
    return {**flushed, "interleaved": interleaved}


def measure(world: fd.Run, args: argparse.Namespace, micros: int) -> dict[str, Any]:
    times = pipelines.seconds_of(args)
    sides = {name: Sleepers(world, layout, *times) for name, layout in layouts(micros).items()}
    for side in sides.values():
        side.step(micros)
    idle: dict[str, list[float]] = {name: [] for name in sides}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    peaks: dict[str, list[int]] = {}
    for turn in range(args.repeats):
        for name, side in rotated(list(sides.items()), turn):
            side.ledger.restart()
            taken = timed(world.group, lambda side=side: side.step(micros))
            idle[name].append(1 - side.busy_seconds() / (RANKS * taken))
            seconds[name].append(taken)
            peaks[name] = side.peaks()
    found = {}
    for name, side in sides.items():
        pipeline = side.layout.pipeline()
        shared = pipeline.stages // RANKS
        costs = Costs.even(pipeline.stages, *(each / shared for each in times))
        simulated = simulate(pipeline, costs)
        formula = (RANKS - 1) / (micros + RANKS - 1)
        predicted = formula if name in BY_FORMULA else simulated.idle_share
        found[name] = {
            "step_ms": 1000 * spread(seconds[name])["median"],
            "simulated_step_ms": 1000 * simulated.seconds,
            "idle_share": spread(idle[name]),
            "predicted": predicted,
            "by": "formula" if name in BY_FORMULA else "simulator",
            "difference": spread(idle[name])["median"] / predicted - 1,
            "activations_held": peaks[name],
            "activations_predicted": list(facts(pipeline).activations),
        }
        side.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    pipelines.add_options(parser, forward_ms=60, repeats=3, save_as="bubble")
    parser.add_argument("--micros", type=int, nargs="+", default=[4, 8, 16])
    args = parser.parse_args()
    restart_on_workers(RANKS)
    world = fd.init()
    found = {str(micros): measure(world, args, micros) for micros in args.micros}
    if world.rank == 0:
        show(args, found)


def show(args: argparse.Namespace, found: dict[str, dict[str, Any]]) -> None:
    forward, backward = pipelines.seconds_of(args)
    worst = max(abs(sides[name]["difference"]) for sides in found.values() for name in BY_FORMULA)
    result = {
        "ranks": RANKS,
        "forward_ms": 1000 * forward,
        "backward_ms": 1000 * backward,
        "repeats": args.repeats,
        "micro_batches": found,
        "target": {"difference_at_most": LARGEST_DIFFERENCE},
        "largest_difference": worst,
        "met": worst <= LARGEST_DIFFERENCE,
    }
    save(args.save, result, args.out)
    for micros, sides in found.items():
        for name, side in sides.items():
            print(
                f"{micros} micro-batches, {name}: {side['step_ms']:.1f} ms a step (simulated "
                f"{side['simulated_step_ms']:.1f}), idle {side['idle_share']['median']:.4f}, "
                f"{side['by']} {side['predicted']:.4f}: {side['difference']:+.1%}; activations "
                f"held {side['activations_held']}, predicted {side['activations_predicted']}"
            )
    print(
        f"largest difference from the formula, {' and '.join(BY_FORMULA)}: {worst:.3f} (target "
        f"{LARGEST_DIFFERENCE}, {'met' if result['met'] else 'missed'})"
    )


if __name__ == "__main__":
    main()

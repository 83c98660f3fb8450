"""A training step of JAX on two workers: `fd.jax.average_gradients` against `jax.distributed`.

The other side is JAX's own: `jax.distributed` with gloo, and `jax.lax.pmean` of the gradients
inside of `jax.shard_map` over the devices of all processes. Both sides live in the same processes,
with the same model, data and optimizer, and take turns in blocks; the median over blocks of the
ratio of neighbouring blocks is what counts. Target: at most 1.0.

    .venv-frontends/bin/python benchmarks/frontends_jax.py
"""

from __future__ import annotations

import argparse
import itertools
import socket
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import restart_on_workers, save, spread
from jax.sharding import PartitionSpec

import farandole as fd

CASES: dict[
    str, tuple[list[int], int, int]
] = {  # widths of the layers, rows of a batch on each worker, steps in a block
    "0.1 M parameters, batch 32": ([128, 256, 256, 10], 32, 40),
    "1.9 M parameters, batch 64": ([784, 1024, 1024, 10], 64, 10),
    "9.4 M parameters, batch 64": ([1024, 2048, 2048, 2048, 10], 64, 4),
}
TARGET = 1.0
OURS, THEIRS = "fd.jax", "jax.distributed"

Step = Callable[..., Any]


def start_jax(run: fd.Run) -> Any:
    """JAX's own processes, beside ours: the same ranks, on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = run.group.broadcast_json(probe.getsockname()[1])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = f"127.0.0.1:{port}"
    bound = {"coordinator_bind_address": address} if run.rank == 0 else {}
    jax.distributed.initialize(address, run.size, run.rank, **bound)
    return jax.make_mesh(
        (run.size,),
        ("ranks",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices(),
    )


def loss_of(params: Any, x: Any, y: Any) -> Any:
    *hidden, last = params
    for w, b in hidden:
        x = jax.nn.relu(x @ w + b)
    return optax.softmax_cross_entropy_with_integer_labels(x @ last[0] + last[1], y).mean()


def make_params(widths: list[int]) -> Any:
    draw = np.random.default_rng(0)
    return [
        (
            np.asarray(draw.normal(size=(a, b)) / np.sqrt(a), np.float32),
            np.zeros(b, np.float32),
        )
        for a, b in itertools.pairwise(widths)
    ]


def our_side(params: Any, x: Any, y: Any) -> tuple[Step, list[Any]]:
    optimizer = optax.chain(fd.jax.average_gradients(), optax.sgd(0.01, momentum=0.9))
    params = jax.tree.map(jnp.asarray, params)

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        updates, state = optimizer.update(jax.grad(loss_of)(params, x, y), state)
        return optax.apply_updates(params, updates), state

    return jax.jit(step), [params, optimizer.init(params), jnp.asarray(x), jnp.asarray(y)]


def their_side(params: Any, x: Any, y: Any, mesh: Any) -> tuple[Step, list[Any]]:
    optimizer = optax.sgd(0.01, momentum=0.9)
    everywhere, parts = PartitionSpec(), PartitionSpec("ranks")

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        grads = jax.lax.pmean(jax.grad(loss_of)(params, x, y), "ranks")
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state

    specs = (everywhere, everywhere, parts, parts)
    shared = jax.shard_map(
        step, mesh=mesh, in_specs=specs, out_specs=(everywhere, everywhere), check_vma=False
    )

    def place(tree: Any, spec: Any) -> Any:
        sharding = jax.sharding.NamedSharding(mesh, spec)
        make = jax.make_array_from_process_local_data
        return jax.tree.map(lambda leaf: make(sharding, np.asarray(leaf)), tree)

    state = optimizer.init(jax.tree.map(jnp.asarray, params))
    given = [place(params, everywhere), place(state, everywhere), place(x, parts), place(y, parts)]
    return jax.jit(shared), given


def block(step: Step, given: list[Any], steps: int) -> float:
    """Seconds for one step; the parameters go on."""
    begin = time.perf_counter()
    for _ in range(steps):
        given[0], given[1] = step(*given)
    jax.block_until_ready(given[:2])
    return (time.perf_counter() - begin) / steps


def measure(run: fd.Run, mesh: Any, name: str, blocks: int) -> dict[str, Any]:
    widths, rows, steps = CASES[name]
    draw = np.random.default_rng(1 + run.rank)
    x = draw.normal(size=(rows, widths[0])).astype(np.float32)
    y = draw.integers(0, widths[-1], rows)
    params = make_params(widths)
    sides = {OURS: our_side(params, x, y), THEIRS: their_side(params, x, y, mesh)}
    for step, given in sides.values():
        block(step, given, 3)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(blocks):
        for side in (OURS, THEIRS) if turn % 2 else (THEIRS, OURS):
            run.group.barrier()
            seconds[side].append(block(*sides[side], steps))
    pairs = zip(seconds[OURS], seconds[THEIRS], strict=True)
    leaves = [jax.tree.leaves(sides[side][1][0]) for side in (OURS, THEIRS)]
    return {
        "ratio": spread([ours / theirs for ours, theirs in pairs]),
        "step_ms": {side: 1000 * spread(values)["median"] for side, values in seconds.items()},
        "largest_difference_of_weights": max(
            float(np.max(np.abs(np.asarray(a) - np.asarray(b.addressable_data(0)))))
            for a, b in zip(*leaves, strict=True)
        ),
        "blocks": blocks,
        "steps_per_block": steps,
        "target": TARGET,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--name", default="frontends_jax", help="of the result; '' writes none")
    args = parser.parse_args()
    restart_on_workers(args.workers)
    run = fd.jax.init()
    mesh = start_jax(run)
    results = {}
    for name in args.cases:
        found = results[name] = measure(run, mesh, name, args.blocks)
        ratio, times = found["ratio"]["median"], found["step_ms"]
        run.print(f"{name}: {times[OURS]:.2f} ms, {times[THEIRS]:.2f} ms, ratio {ratio:.2f}")
    worst = max(found["ratio"]["median"] for found in results.values())
    if run.rank == 0:
        record = {"workers": run.size, "jax": jax.__version__, "cases": results, "worst": worst}
        if args.name:
            save(args.name, record)
        print(f"largest ratio {worst:.2f}, target {TARGET}")


if __name__ == "__main__":
    main()

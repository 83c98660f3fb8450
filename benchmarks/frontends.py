"""TensorFlow on Farandole against TensorFlow's own: the time of a training step with two workers.

`horovod.tensorflow.DistributedGradientTape` against `tf.distribute.MultiWorkerMirroredStrategy`
(gRPC rings), the same network, data and update in a `tf.function`. Both sides live in the same
processes and take turns in blocks; the median over blocks of the ratio of neighbouring blocks is
what counts. Target: at most 1. `--calls` measures what a collective of a graph costs, by how it is
called: as one node that waits, or as two, of which only the second waits.

    .venv-frontends/bin/python benchmarks/frontends.py
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from common import restart_on_workers, save, spread

CASES = {  # widths of a network of dense layers, batch of each worker, steps in a block
    "small, 4 variables, 0.2 MB": ((784, 64, 10), 64, 20),
    "medium, 6 variables, 2.7 MB": ((784, 512, 512, 10), 64, 10),
    "deep, 42 variables, 5.3 MB": ((256, *(256,) * 20, 10), 32, 5),
}
RATE = 0.01


def reserve_ports(number: int) -> list[int]:
    """Free ones of this machine, told to the workers by a variable."""
    sockets = [socket.socket() for _ in range(number)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def network(tf: Any, widths: tuple[int, ...]) -> list[Any]:
    made = []
    for number, (a, b) in enumerate(pairwise(widths)):
        start = tf.random.stateless_normal([a, b], [number, 0]) / a**0.5
        made += [tf.Variable(start), tf.Variable(tf.zeros([b]))]
    return made


def loss_of(tf: Any, variables: list[Any], x: Any, y: Any) -> Any:
    for at in range(0, len(variables) - 2, 2):
        x = tf.nn.relu(x @ variables[at] + variables[at + 1])
    logits = x @ variables[-2] + variables[-1]
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))


def timed(step: Callable[[], Any], steps: int) -> float:
    begin = time.perf_counter()
    for _ in range(steps):
        result = step()
    result.numpy()  # the last one is done
    return (time.perf_counter() - begin) / steps


def train(tf: Any, hvd: Any, strategy: Any, name: str, blocks: int) -> dict[str, Any]:
    widths, batch, steps = CASES[name]
    rng = tf.random.Generator.from_seed(1 + hvd.rank())
    x = rng.normal([batch, widths[0]])
    y = rng.uniform([batch], maxval=10, dtype=tf.int32)
    ours = network(tf, widths)
    with strategy.scope():
        theirs = network(tf, widths)

    @tf.function
    def our_step() -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(tf, ours, x, y)
        for v, g in zip(ours, hvd.DistributedGradientTape(tape).gradient(loss, ours), strict=True):
            v.assign_sub(RATE * g)
        return loss

    def replica_step() -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(tf, theirs, x, y)
        gradients = tape.gradient(loss, theirs)
        context = tf.distribute.get_replica_context()
        averaged = context.all_reduce(tf.distribute.ReduceOp.MEAN, gradients)
        for v, g in zip(theirs, averaged, strict=True):
            v.assign_sub(RATE * g)
        return loss

    @tf.function
    def their_step() -> Any:
        return strategy.run(replica_step)

    sides = [("mirrored", their_step), ("farandole", our_step)]
    for _, step in sides:
        timed(step, steps)
    seconds: dict[str, list[float]] = {side: [] for side, _ in sides}
    for block in range(blocks):
        for side, step in sides if block % 2 else reversed(sides):
            hvd.barrier()
            seconds[side].append(timed(step, steps))
    apart = [float(tf.reduce_max(tf.abs(a - b))) for a, b in zip(ours, theirs, strict=True)]
    ratios = [a / b for a, b in zip(seconds["farandole"], seconds["mirrored"], strict=True)]
    return {
        "ratio": spread(ratios),
        "step_ms": {side: 1000 * spread(values)["median"] for side, values in seconds.items()},
        "largest_difference_of_weights": max(apart),
    }


def calls(tf: Any, hvd: Any, blocks: int) -> dict[str, Any]:
    """Milliseconds of an all-reduce of 4 KB and of 4 MB in a graph: two nodes, and one."""
    import numpy as np

    import farandole.horovod.torch as torch_hvd
    from farandole.comm.buffers import from_buffer, to_array

    def waits(array: Any) -> Any:
        return to_array(torch_hvd.allreduce(from_buffer(array), name="one node"))

    found = {}
    for size in (1024, 2**20):
        x = tf.constant(np.ones(size, "float32"))
        two = tf.function(lambda x=x: hvd.allreduce(x, name="two nodes")[0])
        one = tf.function(lambda x=x: tf.numpy_function(waits, [x], tf.float32)[0])
        sides = [("two nodes", two), ("one node", one)]
        seconds: dict[str, list[float]] = {side: [] for side, _ in sides}
        for block in range(blocks + 1):
            for side, step in sides if block % 2 else reversed(sides):
                hvd.barrier()
                took = timed(step, 20)
                if block:
                    seconds[side].append(took)
        found[f"{4 * size} bytes"] = {
            side: 1000 * spread(values)["median"] for side, values in seconds.items()
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--calls", action="store_true", help="the cost of a call, too")
    parser.add_argument("--name", default="frontends_tensorflow")
    asked = parser.parse_args()
    if "FARANDOLE_JOB" not in os.environ:
        os.environ["BENCHMARK_PORTS"] = json.dumps(reserve_ports(2))
    restart_on_workers(2)
    import tensorflow as tf

    import farandole.horovod.tensorflow as hvd

    hvd.init()
    hosts = [f"localhost:{port}" for port in json.loads(os.environ["BENCHMARK_PORTS"])]
    task = {"type": "worker", "index": hvd.rank()}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": hosts}, "task": task})
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    results: dict[str, Any] = {}
    for name in CASES:
        results[name] = train(tf, hvd, strategy, name, asked.blocks)
        if hvd.rank() == 0:
            print(f"{name}: {results[name]}", flush=True)
    result: dict[str, Any] = {"tensorflow": tf.__version__, "training": results}
    if asked.calls:
        result["call_ms"] = calls(tf, hvd, asked.blocks)
    if hvd.rank() == 0:
        save(asked.name, result)
        worst = max(case["ratio"]["median"] for case in results.values())
        print(f"largest ratio to MultiWorkerMirroredStrategy: {worst:.2f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()

"""An elastic training in a graph. Rank 1 is killed in the middle, and another one replaces it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

hvd.init()
weights = tf.Variable(tf.fill([4], float(hvd.rank())))


@tf.function
def step() -> Any:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((weights - 1.0) ** 2)
    tape = hvd.DistributedGradientTape(tape)
    weights.assign_sub(0.1 * tape.gradient(loss, [weights])[0])
    return loss


@hvd.elastic.run
def train(state: Any) -> None:
    while state.step < 12:
        if state.step == 5 and hvd.rank() == 1 and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        step()
        state.step += 1
        state.commit()


state = hvd.elastic.TensorFlowState([weights], step=0)
train(state)
everybody = hvd.allgather(tf.reshape(weights, [1, 4]))
wanted = 1.0 - 0.8**12  # from rank 0's weights, 12 steps, none twice
assert hvd.size() == 2
assert float(tf.reduce_max(tf.abs(everybody - wanted))) < 1e-6, everybody
print(f"finished {state.step}", flush=True)

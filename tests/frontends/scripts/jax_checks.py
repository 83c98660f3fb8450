"""What fd.jax does between ranks: many checks in one job, since importing JAX takes seconds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import farandole as fd

jax.config.update("jax_enable_x64", True)
run = fd.jax.init(timeout=300)  # a slow machine may take long to compile
rank, size = fd.jax.rank(), fd.jax.size()
rows = np.random.default_rng(0)
x = rows.normal(size=(24 * size, 5))
y = x @ rows.normal(size=(5, 2)) + 0.1 * rows.normal(size=(24 * size, 2))


def refused(what: Callable[[], Any], kind: type[Exception], *words: str) -> None:
    with pytest.raises(kind) as caught:
        what()
    assert all(word in str(caught.value) for word in words), caught.value


def start() -> dict[str, Any]:
    draw = np.random.default_rng(1 + rank)  # rank 0's counts
    return {"in": {"w": jnp.array(draw.normal(size=(5, 8)))}, "out": jnp.zeros((8, 2))}


def loss(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["in"]["w"]) @ params["out"] - y) ** 2)


def close(one: Any, other: Any, limit: float = 1e-12) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        assert float(jnp.max(jnp.abs(a - b))) <= limit, (one, other)


def check_reductions() -> None:
    tree = {
        "a": jnp.arange(4.0) + rank,
        "b": [jnp.full((2, 2), rank, jnp.float32), jnp.array(3.0) * rank],
        "n": jnp.array([rank, 1]),
        "half": jnp.full(3, rank, jnp.bfloat16),
        "none": jnp.zeros((0, 3)),
    }
    ranks = sum(range(size))
    for reduce in (fd.jax.allreduce, jax.jit(fd.jax.allreduce, static_argnums=1)):
        total = reduce(tree, "sum")
        assert jax.tree.structure(total) == jax.tree.structure(tree)
        close(total["a"], size * jnp.arange(4.0) + ranks)
        close(total["b"][0], jnp.full((2, 2), ranks, jnp.float32))
        assert total["n"].tolist() == [ranks, size]
        assert total["half"].dtype == jnp.bfloat16
        assert total["half"].tolist() == [ranks] * 3
        assert reduce(tree["a"], "max").tolist() == [3.0 - 3 + i + size - 1 for i in range(4)]
        assert reduce({}, "sum") == {}


def check_order() -> None:
    """Collectives of one size follow each other: none sees what another left in shared memory."""

    def both(a: Any, b: Any) -> Any:
        first, second = fd.jax.allreduce(a, "sum"), fd.jax.allreduce(b, "sum")

        def more(carry: Any, _: Any) -> tuple[Any, None]:
            return fd.jax.allreduce(carry), None

        last, _ = jax.lax.scan(more, a + rank, None, length=3)
        return first, second, last

    compiled = jax.jit(both)
    for _ in range(20):
        a = jnp.full(1000, 1.0)
        first, second, last = compiled(a, 10 * a)
        assert set(first.tolist()) == {float(size)}
        assert set(second.tolist()) == {10.0 * size}
        close(last, jnp.full(1000, 1 + (size - 1) / 2))
        assert run.sum(1.0) == size  # the run's own, in between


def check_gradient() -> None:
    def total(v: Any) -> Any:
        return jnp.sum((rank + 1) * fd.jax.allreduce(v) ** 2)

    v = jnp.arange(3.0) + rank
    mean = v - rank + (size - 1) / 2
    factor = sum(range(1, size + 1)) / size
    for grad in (jax.grad(total), jax.jit(jax.grad(total))):
        close(grad(v), 2 * factor * mean)


def check_movements() -> None:
    tree = {"a": jnp.arange(3.0) + rank, "n": jnp.array(rank)}
    assert fd.jax.broadcast(tree)["a"].tolist() == [0.0, 1.0, 2.0]
    assert int(fd.jax.broadcast(tree, size - 1)["n"]) == size - 1
    assert [int(of["n"]) for of in fd.jax.allgather(tree)] == list(range(size))
    fd.jax.barrier()


def check_refusals() -> None:
    one = jnp.ones(3)
    refused(lambda: jax.vmap(fd.jax.allreduce)(jnp.ones((2, 3))), fd.UserError, "vmap", "2 times")
    refused(lambda: jax.pmap(fd.jax.allreduce)(jnp.ones((1, 3))), fd.UserError, "pmap")
    refused(
        lambda: jax.grad(lambda v: fd.jax.allreduce(v, "max").sum())(one), fd.UserError, "'max'"
    )
    refused(lambda: jax.jit(fd.jax.broadcast)(one), fd.UserError, "broadcast", "jit")
    refused(lambda: fd.jax.allreduce({"a": "text"}), fd.UserError, "'a'")
    refused(lambda: fd.jax.allreduce({"k": jax.random.key(0)}), fd.UserError, "'k'", "random key")
    refused(lambda: fd.jax.allreduce(one, "median"), fd.UserError, "median")
    for sync, word in {
        "hogwild": "share the memory",
        "server": "parameter servers",
        "allreduce:batchnorm=sync": "batchnorm",
        "local:moments=average": "moments=average",
        "postlocal": "learning rate",
    }.items():
        refused(functools.partial(fd.jax.average, start(), sync=sync), fd.UserError, word)
    refused(lambda: fd.jax.loader(batch_size=2), fd.UserError, "arrays")
    refused(lambda: fd.jax.loader(x, y[1:], batch_size=2), fd.UserError, "rows")
    if size > 1:
        differing = {"a": jnp.ones(2 + rank)}
        error = fd.ModelMismatchError
        refused(lambda: fd.jax.allreduce(differing), error, "'a' (2,)", "'a' (3,)", "rank 1")
        uneven = {"a": one} if rank else {"a": one, "b": one}
        refused(lambda: fd.jax.average(uneven), error, "'b'")
        # The group can still be used.
        assert fd.jax.allreduce(one, "sum").tolist() == [float(size)] * 3


def serial(epochs: int) -> Any:
    """One worker, with the batches of all ranks together."""
    params = fd.jax.broadcast(start())
    optimizer = optax.adam(0.05)
    state = optimizer.init(params)
    for _ in range(epochs):
        for i in range(0, len(x), 8 * size):
            batch = slice(i, i + 8 * size)
            updates, state = optimizer.update(jax.grad(loss)(params, x[batch], y[batch]), state)
            params = optax.apply_updates(params, updates)
    return params


def own_batches() -> Any:
    for i in range(0, len(x), 8 * size):
        own = slice(i + 8 * rank, i + 8 * (rank + 1))
        yield x[own], y[own]


def check_parity_of_optax() -> None:
    """Averaged gradients inside of a compiled step: as one worker with the global batch."""
    params = fd.jax.broadcast(start())
    optimizer = optax.chain(fd.jax.average_gradients(), optax.adam(0.05))
    state = optimizer.init(params)

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        updates, state = optimizer.update(jax.grad(loss)(params, x, y), state)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(step)
    for _ in range(3):
        for batch in own_batches():
            params, state = compiled(params, state, *batch)
    close(params, serial(3))


def train(average: Any, *, compiled: bool, epochs: int = 3) -> Any:
    optimizer = optax.adam(0.05)
    params = average.params
    state = optimizer.init(params)

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        grads = average.gradients(jax.grad(loss)(params, x, y))
        updates, state = optimizer.update(grads, state)
        return average.step(optax.apply_updates(params, updates)), state

    step = jax.jit(step) if compiled else step
    for _ in range(epochs):
        for batch in own_batches():
            params, state = step(params, state, *batch)
    return params


def check_parity_of_average() -> None:
    expected = serial(3)
    for compiled in (False, True):
        average = fd.jax.average(start())
        close(train(average, compiled=compiled), expected)
        close(average.params, expected)  # what a checkpoint would hold


def check_local() -> None:
    """Local steps, then the mean of the models: as computed by hand."""
    average = fd.jax.average(start(), sync="local:every=3")
    params = train(average, compiled=True)
    by_hand = fd.jax.broadcast(start())
    optimizer = optax.adam(0.05)
    state = optimizer.init(by_hand)
    steps = 0
    for _ in range(3):
        for batch in own_batches():
            updates, state = optimizer.update(jax.grad(loss)(by_hand, *batch), state)
            by_hand = optax.apply_updates(by_hand, updates)
            steps += 1
            if steps % 3 == 0:
                by_hand = fd.jax.allreduce(by_hand)
    close(params, by_hand)
    other = dict(start(), more=jnp.ones(1))
    refused(lambda: average.step(other), fd.UserError, "'more'")
    refused(lambda: average.gradients({"in": {}}), fd.UserError, "missing")


def check_uneven_batches() -> None:
    """The last batches of ranks differ in size: each row counts the same."""
    count = 8 * size + 1
    data = fd.jax.loader(x[:count], y[:count], batch_size=8, shuffle=False)
    average = fd.jax.average(start())
    params = whole = average.params
    for own_x, own_y in data:
        grads = average.gradients(jax.grad(loss)(params, own_x, own_y))
        params = average.step(jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))
    for i in range(0, count, 8 * size):
        batch = slice(i, min(i + 8 * size, count))
        grads = jax.grad(loss)(whole, x[batch], y[batch])
        whole = jax.tree.map(lambda p, g: p - 0.1 * g, whole, grads)
    close(params, whole)


def check_epochs() -> None:
    """At the end of a pass the ranks meet: who goes on from weights of before is told."""
    data = fd.jax.loader(x, y, batch_size=8)
    average = fd.jax.average(start(), sync="local:every=100")
    refused(lambda: average.step(start()), fd.UserError, "average.params")
    params = average.params
    for own_x, own_y in data:
        grads = average.gradients(jax.grad(loss)(params, own_x, own_y))
        params = average.step(jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))
    refused(lambda: average.step(params), fd.UserError, "average.params")
    close(average.params, fd.jax.allreduce(params))


def check_state_is_averaged() -> None:
    optimizer = optax.sgd(0.05, momentum=0.9)
    params = start()
    average = fd.jax.average(params, optimizer.init(params), sync="local:every=2,moments=average")
    params = average.params
    state = optimizer.init(params)
    refused(lambda: average.step(params), fd.UserError, "state")

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        grads = average.gradients(jax.grad(loss)(params, x, y))
        updates, state = optimizer.update(grads, state)
        return average.step(optax.apply_updates(params, updates), state)

    compiled = jax.jit(step)
    apart, together = own_batches(), []
    for _ in range(2):
        params, state = compiled(params, state, *next(apart))
        together.append([fd.jax.allgather(tree) for tree in (params, state[0].trace)])
    for first, *others in together[1]:
        for other in others:
            close(other, first, 0.0)
    if size > 1:
        assert not np.allclose(together[0][1][0]["out"], together[0][1][1]["out"])
    close(average.latest(state)[1][0].trace, state[0].trace, 0.0)


def check_checkpoints() -> None:
    average = fd.jax.average(start())
    trained = train(average, compiled=True, epochs=1)
    average.save({"moment": jnp.arange(3.0)})
    train(average, compiled=True, epochs=1)
    loaded, tree = average.load({"moment": jnp.zeros(3)})
    close(loaded, trained, 0.0)
    assert tree["moment"].tolist() == [0.0, 1.0, 2.0]
    refused(lambda: average.load({"other": jnp.zeros(3)}), fd.CheckpointError, "'other'")
    refused(average.load, fd.CheckpointError, "1 trees")


def check_diverged() -> None:
    average = fd.jax.average(start())
    params = average.params
    bad = jax.tree.map(lambda p: p * (jnp.nan if rank == size - 1 else 1.0), params)
    refused(lambda: average.gradients(bad), fd.DivergedError, f"rank {size - 1}", "not finite")


checks = [
    check_reductions,
    check_order,
    check_gradient,
    check_movements,
    check_refusals,
    check_parity_of_optax,
    check_parity_of_average,
    check_local,
    check_uneven_batches,
    check_epochs,
    check_state_is_averaged,
    check_checkpoints,
    check_diverged,
]
for check in checks:
    check()
    if rank == 0:
        print(f"{check.__name__} passed", flush=True)
run.print(f"{len(checks)} checks passed on {size}")

"""Collectives on trees of arrays, in and out of `jit`.

    tree ─▶ callback ─▶ one vector for each dtype ─▶ group ─▶ parts of the vectors ─▶ tree

Inside of `jit` the callback is ordered: XLA keeps all collectives of a process in the order of the
program, in loops and branches too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.experimental import io_callback

from farandole.comm import Op
from farandole.comm.buffers import from_buffer, to_array
from farandole.errors import UserError
from farandole.jax.carrier import carrier
from farandole.jax.trees import Leaf, fused, is_traced, taken_apart, unfused

_LINEAR = ("average", "sum")
_LARGE_BYTES = 1 << 16
_BUCKET_BYTES = 1 << 22
_MOST_BUCKETS = 8


def allreduce(tree: Any, op: Op = "average") -> Any:
    """*Together.* Combines each array of `tree` with those of the other ranks, element by element.

    `op` is `average`, `sum`, `product`, `min` or `max`. The gradient of an average or a sum is the
    average or the sum of the ranks' gradients; others have none and are refused. Works in `jit`,
    `grad`, `scan` and `cond`, if all ranks take the same branch. Inside of `vmap`, `pmap` and
    `shard_map` it is refused. Raises `ModelMismatchError` naming the leaf if the trees differ.
    """
    return reduce_tree(tree, op, weighed=False)


def reduce_tree(tree: Any, op: Op, *, weighed: bool) -> Any:
    """As `allreduce`; `weighed`: each rank counts by the size of its batch."""
    values, described = taken_apart(tree, "allreduce")
    if not values:
        return tree
    if is_traced(values):
        require_one_device()
        return described.rebuild(_in_buckets(values, _traced(op, described.leaves, weighed)))
    here = _settled()
    here.agree(described.leaves)
    return described.rebuild([jnp.array(v) for v in here.reduce(values, op, weighed=weighed)])


def _in_buckets(values: Sequence[Any], reduce: Callable[..., Any]) -> list[Any]:
    """Several callbacks instead of one: while the first travel, XLA computes what the next need.

    They begin at the end, since the gradients of the last layers are there first. Large arrays go
    to the callback as they are: a vector of them would be one more copy. Small ones go with the
    last bucket, as vectors, since each argument of a callback costs time.
    """
    reduced: dict[int, Any] = {}
    *before, last = buckets([value.size * value.dtype.itemsize for value in values])
    for bucket in before:
        results = reduce(*(values[index] for index in bucket))
        reduced |= dict(zip(bucket, results, strict=True))
    rest = sorted(set(range(len(values))) - reduced.keys() - set(last))
    small = [values[index] for index in rest]
    results = reduce(*(values[index] for index in last), *(fused(small) if small else ()))
    reduced |= dict(zip(last, results, strict=False))
    reduced |= dict(zip(rest, unfused(results[len(last) :], small), strict=True))
    return [reduced[index] for index in range(len(values))]


def buckets(nbytes: Sequence[int]) -> list[list[int]]:
    """Which large arrays travel together, from the last one on; small ones are in none.

    One bucket at least, and at most nine: each costs a callback, and has memory that is shared.
    """
    full = max(_BUCKET_BYTES, sum(nbytes) // _MOST_BUCKETS)
    made: list[list[int]] = []
    filled = full
    for index in reversed(range(len(nbytes))):
        if nbytes[index] < _LARGE_BYTES:
            continue
        if filled >= full:
            made.append([])
            filled = 0
        made[-1].append(index)
        filled += nbytes[index]
    return made or [[]]


def broadcast(tree: Any, source: int = 0) -> Any:
    """*Together.* Every rank gets the arrays of rank `source`. Not inside of `jit`."""
    values, described = taken_apart(tree, "broadcast")
    _refuse_traced(values, "broadcast")
    here = _settled()
    here.agree(described.leaves)
    vectors = [here.broadcast(vector, source) for vector in fused(values)] if values else []
    return described.rebuild(list(map(jnp.array, unfused(vectors, values))))


def allgather(tree: Any) -> list[Any]:
    """*Together.* Every rank's tree, in rank order. Not inside of `jit`."""
    values, described = taken_apart(tree, "allgather")
    _refuse_traced(values, "allgather")
    here = _settled()
    here.agree(described.leaves)
    gathered = [here.group.all_gather(from_buffer(vector)) for vector in fused(values)]
    return [
        described.rebuild(
            [jnp.array(part) for part in unfused([to_array(of[rank]) for of in gathered], values)]
        )
        for rank in range(here.group.size)
    ]


def barrier() -> None:
    """*Together.* Returns when every rank has called it."""
    _settled().group.barrier()


def _settled() -> Any:
    """The carrier, when collectives that are under way inside of `jit` have ended."""
    jax.effects_barrier()
    return carrier()


@functools.cache
def _traced(op: Op, leaves: tuple[Leaf, ...], weighed: bool) -> Callable[[Any], Any]:
    """A function of arrays of a tree, for a computation that is being traced."""

    def on_host(*arrays: Any) -> list[Any]:
        here = carrier()
        here.agree(leaves)
        return here.reduce(arrays, op, weighed=weighed)

    @jax.custom_batching.custom_vmap
    def carried(*arrays: Any) -> Any:
        results = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
        return io_callback(on_host, results, *arrays, ordered=True)

    carried.def_vmap(_refuse_vmap)

    @jax.custom_vjp
    def reduced(*arrays: Any) -> Any:
        return carried(*arrays)

    def forward(*arrays: Any) -> tuple[Any, None]:
        if op not in _LINEAR:
            raise UserError(f"allreduce(…, {op!r}) has no gradient here: take average or sum.")
        return carried(*arrays), None

    reduced.defvjp(forward, lambda _, cotangents: tuple(carried(*cotangents)))
    return reduced  # type: ignore[no-any-return]


def _refuse_vmap(size: int, *_: Any) -> NoReturn:
    raise UserError(
        f"a collective inside of jax.vmap would run {size} times in an order of JAX's own. Call it "
        "outside, on the whole batch of arrays."
    )


def require_one_device() -> None:
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if axes:
        raise UserError(
            "a collective between ranks inside of jax.pmap or jax.shard_map would run once for "
            "each device of the process. Combine the devices with jax.lax.pmean first, and call "
            "the collective outside."
        )


def _refuse_traced(values: Sequence[Any], what: str) -> None:
    if is_traced(values):
        raise UserError(f"fd.jax.{what} does not work inside of jit: call it outside.")

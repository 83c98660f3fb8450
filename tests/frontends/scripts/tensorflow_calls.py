"""Every call of horovod.tensorflow, at once and in a graph, against what Horovod documents.

Run by `farandole run --horovod -n N`. Each check is a function; what fails is named. Of many ranks,
the argument `few` leaves out what is the same with two.
"""

from __future__ import annotations

import random
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

hvd.init()
R, N = hvd.rank(), hvd.size()
MODES: dict[str, Callable[[Any], Any]] = {"eager": lambda f: f, "graph": tf.function}
CHECKS: list[tuple[str, Callable[[], None]]] = []


def check(body: Callable[..., None]) -> Callable[..., None]:
    """In both modes where the check takes one."""
    if body.__code__.co_argcount:
        for mode, wrap in MODES.items():
            CHECKS.append((f"{body.__name__} ({mode})", lambda wrap=wrap: body(wrap)))
    else:
        CHECKS.append((body.__name__, body))
    return body


def same(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=1e-6)


def raises(kind: type[Exception], text: str, body: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        body()


def mine(rows: int = 3) -> tf.Tensor:
    return tf.reshape(tf.range(rows * 2, dtype=tf.float64), [rows, 2]) + 10.0 * R


TOTAL = sum(range(N))


@check
def who_is_where(wrap: Any) -> None:
    @wrap
    def ask() -> Any:
        return [hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op()]

    assert [int(v) for v in ask()] == [R, N, hvd.local_rank(), hvd.local_size()]
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
    assert hvd.is_initialized()
    assert hvd.gloo_enabled()
    assert hvd.mpi_built() in (True, False)
    assert not hvd.mpi_threads_supported()


@check
def all_reductions(wrap: Any) -> None:
    sums = mine() * N - 10.0 * R * N + 10.0 * TOTAL

    @wrap
    def reduce(x: Any) -> Any:
        return [
            hvd.allreduce(x),
            hvd.allreduce(x, average=False),
            hvd.allreduce(x, op=hvd.Sum, name="named", prescale_factor=0.5, postscale_factor=4.0),
            hvd.allreduce(x, op=hvd.Min),
            hvd.allreduce(x, op=hvd.Max),
            hvd.allreduce(tf.fill([2], 2.0), op=hvd.Product),
            hvd.allreduce(tf.cast(x, tf.float32), compression=hvd.Compression.fp16),
        ]

    average, total, scaled, low, high, product, small = reduce(mine())
    same(average, sums / N)
    same(total, sums)
    same(scaled, sums * 2.0)
    same(low, mine() - 10.0 * R)
    same(high, mine() - 10.0 * R + 10.0 * (N - 1))
    same(product, [2.0**N] * 2)
    same(small, sums / N)
    assert small.dtype == tf.float32
    assert average.shape == (3, 2)
    raises(ValueError, "not both", lambda: hvd.allreduce(mine(), average=True, op=hvd.Sum))


@check
def every_dtype(wrap: Any) -> None:
    for dtype in ("float64", "float32", "float16", "bfloat16", "int8", "int32", "int64", "uint8"):
        add = wrap(lambda x: hvd.allreduce(x, op=hvd.Sum))
        found = add(tf.cast(tf.fill([3], R + 1), dtype))
        assert found.dtype.name == dtype
        assert tf.cast(found, tf.int32).numpy().tolist() == [TOTAL + N] * 3
    anyone = wrap(lambda x: hvd.allreduce(x, op=hvd.Max))
    assert anyone(tf.constant([R == 0, False])).numpy().tolist() == [True, False]


@check
def adasum(wrap: Any) -> None:
    if N & (N - 1):
        return
    combine = wrap(lambda x: hvd.allreduce(x, op=hvd.Adasum))
    same(combine(tf.constant([1.0, 2.0])), [1.0, 2.0])  # what all agree on stays
    apart = tf.one_hot(R, N, dtype=tf.float64)
    same(combine(apart), [1.0] * N)  # what is at right angles adds up


@check
def grouped(wrap: Any) -> None:
    @wrap
    def reduce(x: Any, y: Any) -> Any:
        return hvd.grouped_allreduce([x, y], op=hvd.Sum, name="pair")

    first, second = reduce(mine(), tf.constant([R], tf.int32))
    same(first, mine() * N - 10.0 * R * N + 10.0 * TOTAL)
    assert second.numpy().tolist() == [TOTAL]
    one, two = wrap(lambda: hvd.grouped_allgather([mine(R + 1), tf.constant(R)]))()
    assert one.shape == (sum(range(1, N + 1)), 2)
    assert two.numpy().tolist() == list(range(N))
    parts = wrap(lambda: hvd.grouped_reducescatter([tf.ones([N, 2]), tf.ones([2 * N])]))()
    assert [part.shape for part in parts] == [(1, 2), (2,)]


@check
def slices(wrap: Any) -> None:
    @wrap
    def reduce(op: str, factor: float) -> Any:
        given = tf.IndexedSlices(
            tf.fill([2, 2], 1.0 + R), tf.constant([0, R + 1]), tf.constant([N + 1, 2])
        )
        return hvd.allreduce(given, op=op, prescale_factor=factor)

    found = reduce(hvd.Average, 1.0)
    assert isinstance(found, tf.IndexedSlices)
    dense = tf.convert_to_tensor(found)
    same(dense[0], [(TOTAL + N) / N] * 2)
    same(dense[N], [1.0] * 2)
    same(tf.convert_to_tensor(reduce(hvd.Sum, 2.0))[N], [2.0 * N] * 2)
    raises(Exception, "IndexedSlices can be combined", lambda: reduce(hvd.Max, 1.0))


@check
def moves(wrap: Any) -> None:
    whole = wrap(lambda x: hvd.allgather(x, name="uneven"))(mine(R + 1))
    wanted = np.concatenate([np.arange(2.0 * (r + 1)).reshape(-1, 2) + 10 * r for r in range(N)])
    same(whole, wanted)
    same(wrap(lambda: hvd.allgather(tf.constant(float(R))))(), np.arange(N))
    same(wrap(lambda x: hvd.broadcast(x, N - 1))(mine()), mine() - 10.0 * R + 10.0 * (N - 1))
    even = wrap(lambda: hvd.alltoall(tf.range(N) + 10 * R))()
    assert even.numpy().tolist() == [10 * r + R for r in range(N)]
    splits = tf.range(1, N + 1)  # r + 1 rows to rank r
    rows = tf.fill([sum(range(1, N + 1)) + 1, 1], R)  # the last one goes nowhere
    got, counts = wrap(lambda: hvd.alltoall(rows, splits))()
    assert got.numpy().ravel().tolist() == [r for r in range(N) for _ in range(R + 1)]
    assert counts.numpy().tolist() == [R + 1] * N
    part = wrap(lambda: hvd.reducescatter(tf.range(N + 1.0), op=hvd.Sum, ignore_name_scope=True))()
    share = list(range(2)) if R == 0 else [R + 1]
    same(part, [float(N * i) for i in share])


@check
def gradients_flow_back(wrap: Any) -> None:
    def grad(call: Callable[[Any], Any], x: Any) -> Any:
        @wrap
        def run(x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = call(x)
            return tape.gradient(y, x, output_gradients=tf.ones_like(y) * (R + 1.0))

        return run(x)

    mean = (TOTAL + N) / N
    x = mine(N)
    same(grad(lambda x: hvd.allreduce(x, op=hvd.Sum), x), tf.fill([N, 2], mean * N))
    same(grad(hvd.allreduce, x), tf.fill([N, 2], mean))
    same(grad(hvd.allgather, mine(R + 1)), tf.fill([R + 1, 2], mean))
    same(grad(lambda x: hvd.broadcast(x, 0), x), tf.fill([N, 2], mean if R == 0 else 0.0))
    same(grad(hvd.alltoall, x)[:, 0], np.arange(N) + 1.0)
    same(grad(hvd.reducescatter, x)[:, 0], np.arange(N) + 1.0)
    same(grad(lambda x: hvd.reducescatter(x, op=hvd.Sum), x)[:, 0], N * (np.arange(N) + 1.0))
    kept = grad(lambda x: hvd.alltoall(x, tf.ones([N], tf.int32))[0], mine(N + 2))
    same(kept[:, 0], [*(np.arange(N) + 1.0), 0.0, 0.0])
    both = grad(lambda x: tf.add_n(hvd.grouped_allreduce([x, 2 * x])), x)
    same(both, tf.fill([N, 2], 3 * mean))
    raises(Exception, "has no gradient", lambda: grad(lambda x: hvd.allreduce(x, op=hvd.Max), x))

    @wrap
    def twice(x: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = hvd.allreduce(x * x, op=hvd.Sum)
            first = inner.gradient(y, x)
        return outer.gradient(first, x)

    same(twice(tf.constant([3.0])), [2.0 * N])


@check
def any_order_in_a_graph() -> None:
    """Each rank has its own order of the same names, and some depend on others."""
    names = [f"order.{i}" for i in range(12)]
    for turn in range(3):
        own = random.Random(1000 * turn + R).sample(names, len(names))

        @tf.function
        def run(own: list[str] = own) -> Any:
            found = {
                name: hvd.allreduce(tf.fill([4], float(name[6:])), name=name, op=hvd.Sum)
                for name in own
            }
            last = hvd.allreduce(tf.add_n(list(found.values())), name="order.last", op=hvd.Sum)
            return [found[name] for name in names], last

        for _ in range(3):
            found, last = run()
            for index, value in enumerate(found):
                same(value, [float(index * N)] * 4)
            same(last, [66.0 * N * N] * 4)


@check
def in_loops_and_branches() -> None:
    @tf.function
    def run(times: Any) -> Any:
        total = tf.zeros([2])
        for i in tf.range(times):
            if i % 2 == 0:
                total += hvd.allreduce(tf.fill([2], 1.0), op=hvd.Sum, name="looped")
        return total

    same(run(tf.constant(5)), [3.0 * N] * 2)


@check
def unused_results_are_asked_for_all_the_same() -> None:
    @tf.function
    def run(x: Any) -> Any:
        hvd.allreduce(x, name="unused")
        return x + 1.0

    for _ in range(5):
        run(tf.ones([2]))
    hvd.barrier()


@check
def results_are_apart_from_inputs(wrap: Any) -> None:
    given = tf.ones([100])
    for call in (hvd.allreduce, hvd.allgather, lambda x: hvd.broadcast(x, 0), hvd.reducescatter):
        found = wrap(lambda x, call=call: call(x) * 2.0 + 1.0)(given)
        assert float(tf.reduce_max(found)) == 3.0
        same(given, np.ones(100))


@check
def barriers_and_join(wrap: Any) -> None:
    wrap(hvd.barrier)()
    if R == 0 and N > 1:
        same(hvd.allreduce(tf.ones([2]), op=hvd.Sum, name="uneven.steps"), [1.0, 1.0])
    last = int(hvd.join())
    assert 0 <= last < N


@check
def process_sets() -> None:
    if N == 1:
        return
    ranks = [0, N - 1] if N > 2 else [1]
    some = hvd.add_process_set(hvd.ProcessSet(ranks))
    if some.included():
        same(hvd.allreduce(tf.constant([float(R)]), process_set=some), [sum(ranks) / len(ranks)])
        graph = tf.function(lambda: hvd.allgather(tf.constant([R]), process_set=some))
        assert graph().numpy().tolist() == ranks
        assert int(hvd.size_op(some.process_set_id)) == len(ranks)
    assert int(hvd.process_set_included_op(some.process_set_id)) == int(R in ranks)
    assert hvd.remove_process_set(some)
    raises(ValueError, "no process set 77", lambda: hvd.size_op(77))


@check
def variables(wrap: Any) -> None:
    found = [tf.Variable(mine()), tf.Variable(R), tf.Variable(tf.cast([R], tf.bfloat16))]
    wrap(lambda: hvd.broadcast_variables(found, root_rank=N - 1))()
    same(found[0], mine() - 10.0 * R + 10.0 * (N - 1))
    assert int(found[1]) == N - 1
    assert found[2].numpy().astype(int).tolist() == [N - 1]
    assert hvd.broadcast_(found, 0) is found
    raises(ValueError, "cannot be overwritten", lambda: hvd.broadcast_variables([tf.ones(2)], 0))
    raises(ValueError, "no variables", lambda: hvd.broadcast_variables([], 0))
    raises(ValueError, "broadcast_variables", lambda: hvd.broadcast_global_variables(0))


@check
def objects() -> None:
    value = {"rank": R, "list": [1, "two", (3.0, None)], "tensor": tf.constant([1.0, R])}
    found = hvd.broadcast_object(value, root_rank=N - 1)
    assert found["rank"] == N - 1
    assert found["list"] == [1, "two", (3.0, None)]
    assert found["tensor"].tolist() == [1.0, N - 1]
    assert hvd.broadcast_object_fn(root_rank=0)([R]) == [0]
    assert [one["rank"] for one in hvd.allgather_object({"rank": R})] == list(range(N))


@check
def tape(wrap: Any) -> None:
    w, b, e = tf.Variable([1.0, 2.0]), tf.Variable(0.5), tf.Variable(tf.ones([4, 2]))

    def gradients(**options: Any) -> Any:
        @wrap
        def run(x: Any) -> Any:
            with tf.GradientTape() as tape:
                y = tf.reduce_sum(w * x) + tf.reduce_sum(tf.gather(e, [0, R % 4]))
            tape = hvd.DistributedGradientTape(tape, **options)
            assert isinstance(tape, tf.GradientTape)
            return tape.gradient(y, [w, b, e])

        return run(tf.constant([1.0, 2.0]) * (R + 1.0))

    mean = (TOTAL + N) / N
    one, none, sparse = gradients()
    same(one, [mean, 2.0 * mean])
    assert none is None
    assert isinstance(sparse, tf.IndexedSlices)
    same(tf.convert_to_tensor(sparse)[0, 0], sum(2 if r % 4 == 0 else 1 for r in range(N)) / N)
    one, _, dense = gradients(op=hvd.Sum, sparse_as_dense=True)
    same(one, [mean * N, 2.0 * mean * N])
    assert not isinstance(dense, tf.IndexedSlices)
    same(gradients(gradient_predivide_factor=2.0)[0], [mean, 2.0 * mean])
    same(gradients(compression=hvd.Compression.bf16, num_groups=2)[0], [mean, 2.0 * mean])
    raises(Exception, "has none", lambda: gradients(op=hvd.Sum, gradient_predivide_factor=2.0))
    raises(ValueError, "tf.GradientTape", lambda: hvd.DistributedGradientTape(3))

    @wrap
    def local(x: Any) -> Any:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            y = tf.reduce_sum(w * x) + b * x[0]
        tape.register_local_source(b)
        return tape.gradient(y, {"w": w, "b": b})

    found = local(tf.constant([1.0, 2.0]) * (R + 1.0))
    same(found["w"], [mean, 2.0 * mean])
    same(found["b"], (R + 1.0) / N)


@check
def bad_input(wrap: Any) -> None:
    import torch

    raises(ValueError, "not None", lambda: hvd.allreduce(None))
    raises(ValueError, "string", lambda: wrap(hvd.allreduce)(tf.constant(["a"])))
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])
    raises(ValueError, "RaggedTensor", lambda: hvd.allreduce(ragged))
    raises(ValueError, "Use horovod.torch", lambda: hvd.allgather(torch.ones(2)))
    raises(ValueError, "at least one", lambda: hvd.grouped_allreduce([]))
    raises(ValueError, "no reduction 'mean'", lambda: hvd.allreduce(tf.ones(2), op="mean"))
    raises(ValueError, "already", lambda: twice_distributed())
    if N > 1:
        differ = wrap(lambda: hvd.allreduce(tf.ones([2 + (R == 1)]), name="differ"))
        raises(Exception, "do not ask for the same under the name 'allreduce.differ'", differ)
        w, b = tf.Variable([1.0]), tf.Variable([1.0])

        @wrap
        def one_has_none() -> Any:
            with tf.GradientTape() as tape:
                y = w * 2.0 if R == 1 else w * b
            return hvd.DistributedGradientTape(tape).gradient(y, [w, b])

        raises(Exception, "op average, without variable 1 (", one_has_none)

        @wrap
        def each_has_another() -> Any:
            with tf.GradientTape() as tape:
                y = w * 2.0 if R == 1 else b * 2.0
            return hvd.DistributedGradientTape(tape).gradient(y, [w, b])

        raises(Exception, "op average, without variable 0 (", each_has_another)
        same(hvd.allreduce(tf.ones(2)), [1.0, 1.0])  # and it goes on
    raises(ValueError, "XLA", lambda: tf.function(hvd.allreduce, jit_compile=True)(tf.ones(2)))


@check
def sessions_of_tensorflow_1() -> None:
    with tf.Graph().as_default():
        for call in (hvd.allreduce, hvd.rank_op, hvd.broadcast_variables):
            given = [tf.compat.v1.get_variable(f"v{call.__name__}", [2])]
            arguments = {"allreduce": given, "rank_op": []}.get(call.__name__, [given, 0])
            raises(ValueError, "a graph of TensorFlow 1", lambda c=call, a=arguments: c(*a))
    raises(ValueError, "tf.function", lambda: hvd.BroadcastGlobalVariablesHook(0))
    raises(ValueError, "sessions", lambda: hvd.elastic.TensorFlowState([], session=object()))


@check
def names_that_are_not_there() -> None:
    import horovod.tensorflow.keras as keras_hvd
    import horovod.tensorflow.mpi_ops as operations

    assert operations.size_op is hvd.size_op
    assert not hasattr(hvd, "nothing")
    for module, name, text in (
        (hvd, "gpu_available", "horovod.tensorflow has no 'gpu_available' in Farandole. It is an"),
        (hvd, "OtherHook", "sessions of TensorFlow 1"),
        (hvd, "nothing", "docs/tensorflow.md"),
        (keras_hvd, "broadcast_variables", "It is in horovod.tensorflow"),
        (operations, "MPI_LIB", "horovod.tensorflow.mpi_ops has no 'MPI_LIB'"),
    ):
        raises(AttributeError, text, lambda m=module, n=name: getattr(m, n))
    with pytest.raises(ModuleNotFoundError, match=re.escape("tf.data.experimental.service")):
        import horovod.tensorflow.data.compute_service  # noqa: F401


def twice_distributed() -> None:
    hvd.DistributedOptimizer(hvd.DistributedOptimizer(tf.keras.optimizers.SGD()))


@check
def torch_beside_tensorflow() -> None:
    import horovod.torch as thvd
    import torch

    assert (thvd.rank(), thvd.size()) == (R, N)
    assert thvd.allreduce(torch.full((2,), float(R)), op=thvd.Sum).tolist() == [TOTAL] * 2
    same(hvd.allreduce(tf.fill([2], float(R)), op=hvd.Sum), [TOTAL] * 2)


def main() -> None:
    failed = 0
    few = ("all_reductions (e", "moves", "any_order", "process_sets", "tape (graph)", "gradients")
    for name, body in CHECKS:
        if "few" in sys.argv and not name.startswith(few):
            continue
        try:
            body()
        except Exception:
            failed += 1
            print(f"FAILED {name} on rank {R}: {traceback.format_exc()}", flush=True)
    print(f"{len(CHECKS)} checks, {failed} failed", flush=True)
    hvd.shutdown()
    sys.exit(failed > 0)


main()

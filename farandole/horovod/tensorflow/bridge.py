"""From TensorFlow's tensors to the engine and back, at once or inside a graph.

The collectives are those of `farandole.horovod.torch`: a tensor of TensorFlow is lent to them as a
torch tensor over the same memory. Inside a `tf.function` a collective is two nodes:

    tensors ──▶ start (stateful) ──▶ number ──▶ finish (stateless) ──▶ results

TensorFlow runs stateful nodes in the order of the program, so a single node that waits would make
ranks whose programs have another order wait for each other for ever. `start` only asks the engine
and returns. `finish` waits, and all that depend on its results wait with it, nobody else.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from farandole.comm.buffers import from_buffer, to_array
from farandole.errors import UserError
from farandole.horovod.tensorflow.framework import tf, unconverted
from farandole.horovod.torch.handles import Handle

_ALIGNMENT_BYTES = 64  # TensorFlow's kernels rely on it, and end the process where it is missing
_MOST_UNFINISHED = 256
"""Of one node. What nobody finishes, because its result is not used, is forgotten beyond that."""

Start = Callable[[list[torch.Tensor]], Handle]


class Output(NamedTuple):
    """What a graph must know of a result before it is there; None for a size that is not known."""

    dtype: Any
    shape: Any = None

    @classmethod
    def like(cls, tensor: Any) -> Output:
        return cls(tensor.dtype, tensor.shape)

    @classmethod
    def rows_like(cls, tensor: Any) -> Output:
        """With another number of rows."""
        if tensor.shape.rank is None:
            return cls(tensor.dtype)
        return cls(tensor.dtype, [None, *tensor.shape[1:]])


@unconverted
def collective(
    start: Start, tensors: Sequence[Any], outputs: Sequence[Output], name: str | None
) -> list[Any]:
    """The results of the collective that `start` asks for, whose handle gives as many tensors as
    there are `outputs`. `name` is the one under which it is asked for, if it was given one."""
    if tf.executing_eagerly():
        given = [from_buffer(tensor) for tensor in tensors]
        return [_to_tensorflow(result) for result in _apart(start(given).wait(), given)]
    return _in_graph(start, tensors, outputs, name)


@unconverted
def ask(question: Callable[[], int], dtype: Any) -> Any:
    """A scalar that is asked for each time the graph runs, as the number of ranks."""
    if tf.executing_eagerly():
        return tf.constant(question(), dtype)
    require_function()

    def answered() -> Any:
        with keeping_failures():
            return np.asarray(question(), dtype.as_numpy_dtype)

    answer = tf.numpy_function(answered, [], dtype, stateful=True)
    answer.set_shape([])
    return answer


def _in_graph(
    start: Start, tensors: Sequence[Any], outputs: Sequence[Output], name: str | None
) -> list[Any]:
    require_function()
    node = _Node(start, name)
    number = tf.numpy_function(node.start, list(tensors), tf.int64, stateful=True)
    number.set_shape([])
    kinds = [output.dtype for output in outputs]
    results = tf.numpy_function(node.finish, [number], kinds, stateful=False)
    found = list(results) if isinstance(results, (list, tuple)) else [results]
    for result, output in zip(found, outputs, strict=True):
        result.set_shape(output.shape)
    return found


class _Node:
    """One collective of a graph, each time that the graph runs."""

    def __init__(self, start: Start, name: str | None) -> None:
        self._start = start
        self._name = name
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._flights: OrderedDict[int, tuple[Handle, list[torch.Tensor]]] = OrderedDict()

    def start(self, *arrays: Any) -> Any:
        with keeping_failures():
            given = [from_buffer(array) for array in arrays]
            self._await_same_name()
            handle = self._start(given)
        if self._name is not None:
            _LATEST[self._name] = handle
        with self._lock:
            number = next(self._numbers)
            self._flights[number] = (handle, given)
            while len(self._flights) > _MOST_UNFINISHED:
                self._flights.popitem(last=False)
        return np.int64(number)

    def finish(self, number: Any) -> list[Any]:
        with self._lock:
            handle, given = self._flights.pop(int(number))
        with keeping_failures():
            results = handle.wait()
        if self._name is not None and _LATEST.get(self._name) is handle:
            _LATEST.pop(self._name, None)  # it would keep the results
        return [to_array(result) for result in _apart(results, given)]

    def _await_same_name(self) -> None:
        """The engine takes a name again when it is done with it: in a loop, say, the next turn may
        come before. That the last one failed is told to those who wait for its results."""
        before = _LATEST.pop(self._name, None) if self._name is not None else None
        if before is not None and not before.done():
            with suppress(Exception):
                before.wait()


_LATEST: Final[dict[str, Handle]] = {}
"""By name, what was last asked for by a graph."""


def _apart(results: Any, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Results in memory of their own. TensorFlow may overwrite a result that it alone uses, and
    does not know that the memory is also that of an input."""
    found = list(results) if isinstance(results, (list, tuple)) else [results]
    taken = {tensor.untyped_storage().data_ptr() for tensor in given if tensor.numel()}
    return [
        result.clone() if result.untyped_storage().data_ptr() in taken else result.contiguous()
        for result in found
    ]


def _to_tensorflow(result: torch.Tensor) -> Any:
    if not result.numel():
        return tf.convert_to_tensor(to_array(result))
    if not result.is_cuda and result.data_ptr() % _ALIGNMENT_BYTES:
        result = result.clone()
    return tf.experimental.dlpack.from_dlpack(result.__dlpack__())


def require_function() -> None:
    """Of the graph that is being built: a `tf.function`'s, not compiled by XLA."""
    graph = tf.compat.v1.get_default_graph()
    if not graph.building_function:
        # There, nodes with effects run in any order, which another rank need not share.
        raise UserError(
            "collectives cannot be part of a graph of TensorFlow 1, for a session. Call them in "
            "eager mode or in a tf.function: leave out tf.compat.v1.disable_eager_execution(), "
            "tf.Graph().as_default() and sessions."
        )
    _require_no_xla(graph)


def _require_no_xla(graph: Any) -> None:
    """XLA cannot call Python. TensorFlow's own message would name a node that nobody wrote."""
    while graph is not None:
        context = graph._get_control_flow_context()
        while context is not None:
            if context.IsXLAContext():
                raise UserError(
                    "collectives cannot be compiled by XLA. Use tf.function without jit_compile; "
                    "for Keras, model.compile(…, jit_compile=False), or add "
                    "hvd.callbacks.BroadcastGlobalVariablesCallback(0), which sees to it."
                )
            context = context.outer_context
        graph = getattr(graph, "outer_graph", None)


# A graph turns every exception into one of TensorFlow's, which knows the original by its text only.

_FAILURES: Final[list[Exception]] = []


@contextmanager
def keeping_failures() -> Iterator[None]:
    """What goes wrong inside, in a thread of TensorFlow's, is kept for `cause_of`."""
    try:
        yield
    except Exception as error:
        _FAILURES[:] = [*_FAILURES[-7:], error]
        raise


def cause_of(error: Exception) -> Exception | None:
    """What was raised in a collective of a graph that failed with `error`, if it was one."""
    text = str(error)
    found = next((kept for kept in reversed(_FAILURES) if str(kept) in text), None)
    if found is not None:
        _FAILURES.clear()
    return found

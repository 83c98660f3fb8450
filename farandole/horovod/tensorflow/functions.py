"""What a training script sends around at its start: variables and objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from farandole.comm.buffers import from_buffer, to_array
from farandole.errors import UserError
from farandole.horovod.common.process_sets import ProcessSet, global_process_set
from farandole.horovod.tensorflow.bridge import keeping_failures, require_function
from farandole.horovod.tensorflow.framework import as_tensor, tf, unconverted
from farandole.horovod.torch.basics import rank
from farandole.horovod.torch.functions import broadcast_parameters, from_all, from_root

T = TypeVar("T")


@unconverted
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> None:
    """Overwrites variables with those of `root_rank`, many at once.

    All ranks must pass variables of the same shapes and dtypes, in the same order. `inplace` is
    Horovod's: variables are always overwritten.
    """
    del inplace
    found = [_variable(item) for item in variables]
    if not found:
        raise UserError("broadcast_variables was given no variables: build the model before.")
    values = [as_tensor(variable, "broadcast_variables") for variable in found]

    def exchange(*buffers: Any) -> list[Any]:
        with keeping_failures():
            mine = [from_buffer(buffer) for buffer in buffers]
            # The root's are only read; others are overwritten, and so must be copies.
            tensors = mine if rank() == root_rank else [tensor.clone() for tensor in mine]
            named = [(f"variable.{index}", tensor) for index, tensor in enumerate(tensors)]
            broadcast_parameters(named, root_rank, process_set)
            return [to_array(tensor) for tensor in tensors]

    if tf.executing_eagerly():
        if (received := exchange(*values)) and rank() == root_rank:
            return
    else:
        require_function()
        kinds = [value.dtype for value in values]
        received = tf.numpy_function(exchange, values, kinds, stateful=True)
        for variable, value in zip(found, received, strict=True):
            value.set_shape(variable.shape)
    for variable, value in zip(found, received, strict=True):
        variable.assign(value)


def _variable(item: Any) -> Any:
    if not (hasattr(item, "assign") and hasattr(item, "dtype")):
        raise UserError(
            f"a {type(item).__name__} cannot be overwritten. Pass variables, as model.variables "
            "and optimizer.variables are, or use hvd.broadcast()."
        )
    return item


def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Sequence[Any]:
    """`broadcast_variables`; returns the variables."""
    del name
    broadcast_variables(variables, root_rank, process_set)
    return variables


def broadcast_global_variables(root_rank: int) -> None:
    """TensorFlow 1's, whose graphs have a collection of all variables. Raises `UserError`."""
    raise UserError(
        f"broadcast_global_variables({root_rank}): TensorFlow 2 has no list of all variables, and "
        "sessions of TensorFlow 1 are not supported. Use "
        "hvd.broadcast_variables(model.variables + optimizer.variables, root_rank=0)."
    )


def broadcast_object(
    obj: T,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> T:
    """`root_rank`'s object, on every rank; what others pass does not matter.

    Any nest of plain values, arrays and tensors; tensors of TensorFlow arrive as arrays. `session`
    is TensorFlow 1's.
    """
    del session
    received: T = from_root(_plain(obj), root_rank, name or "broadcast_object", process_set)
    return received


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[T], T]:
    """`broadcast_object` as a function of the object alone."""

    del session

    def broadcast(obj: T) -> T:
        received: T = from_root(_plain(obj), root_rank, name or "broadcast_object", process_set)
        return received

    return broadcast


def allgather_object(
    obj: T,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[T]:
    """Every rank's object, in rank order. What they may be: see `broadcast_object`."""
    del session
    return from_all(_plain(obj), name or "allgather_object", process_set)


def _plain(obj: Any) -> Any:
    """Tensors of TensorFlow as arrays, wherever they are in lists, tuples and dicts."""
    if isinstance(obj, (tf.Tensor, tf.Variable)):
        return obj.numpy()
    if type(obj) in (list, tuple):
        return type(obj)(_plain(item) for item in obj)
    if type(obj) is dict:
        return {key: _plain(value) for key, value in obj.items()}
    return obj

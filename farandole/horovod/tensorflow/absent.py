"""Names of Horovod's that are not here, and what to use in their place.

Without this a script would end with Python's "module has no attribute", which tells nobody whether
the name is missing, misspelt, or in another of Horovod's modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from farandole.errors import UserError

_FOR_SESSIONS = "It is for sessions of TensorFlow 1, which Farandole does not support"
_INNER = "It is an inner part of Horovod, which its documentation does not name"
_ABSENT: Final = {
    "LocalGradientAggregationHelper": f"{_INNER}; use "
    "hvd.DistributedOptimizer(optimizer, backward_passes_per_step=…)",
    "check_extension": f"{_INNER}; nothing is compiled here, so leave the call out",
    "check_num_rank_power_of_2": f"{_INNER}; hvd.Adasum says itself which sizes it takes",
    "gpu_available": f"{_INNER}; use tf.config.list_physical_devices('GPU')",
    "handle_average_backwards_compatibility": f"{_INNER}; pass op=hvd.Average or op=hvd.Sum",
    "refs_to_vars": f"{_INNER}; use [ref.deref() for ref in refs]",
    "split_list": f"{_INNER}; leave it out, since all gradients are sent at once",
    "vars_to_refs": f"{_INNER}; use [variable.ref() for variable in variables]",
}
_OF_TENSORFLOW: Final = (
    "DistributedGradientTape",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "allgather_object",
    "alltoall",
    "barrier",
    "broadcast_",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "size_op",
)
"""What Horovod has in `horovod.tensorflow` only."""


class BroadcastGlobalVariablesHook:
    """TensorFlow 1's, for sessions and estimators. Raises `UserError`."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        raise UserError(
            f"BroadcastGlobalVariablesHook({root_rank}): sessions and estimators of TensorFlow 1 "
            "are not supported. Write the step as a tf.function, or use model.fit, and call "
            "hvd.broadcast_variables(model.variables, root_rank=0) or add "
            "hvd.callbacks.BroadcastGlobalVariablesCallback(0)."
        )


def named(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module of Horovod's: it raises, and says what to do."""

    def absent(name: str) -> Any:
        raise AttributeError(_why(module, name), name=name)

    return absent


def _why(module: str, name: str) -> str:
    advice = _ABSENT.get(name)
    if advice is None and name in _OF_TENSORFLOW:
        advice = f"It is in horovod.tensorflow: horovod.tensorflow.{name}"
    if advice is None and name.endswith("Hook"):
        advice = f"{_FOR_SESSIONS}: use a tf.function, or model.fit with hvd.callbacks"
    if advice is None:
        advice = "docs/tensorflow.md lists what there is"
    return f"{module} has no {name!r} in Farandole. {advice}."

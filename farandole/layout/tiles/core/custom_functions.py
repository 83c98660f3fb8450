"""`torch.autograd.Function`s in a model, which torch calls below `__torch_function__`.

A function of this kind may do in its backward what it likes with the gradient, such as turn it
round or clip it. So every shard computes it whole, in both directions: with all of its input, and
with the whole gradient of its output, which is that of all shards together.

    input   each shard's part ──▶ all of it   ── forward ──▶   output, cut again
            its part          ◀── once of all ◀── backward ──   gradients of all shards, added up

A function of weights alone, such as one that rounds them, is seen too: each shard would give it the
gradient of its own tile.

Torch's checkpoint is one too, and would run the model again in the backward pass, where shards
could not agree on what they exchange. It runs once, and keeps its activations. So does the other
kind of checkpoint, which is no custom function. Only what the layout itself recomputes runs again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.autograd.function import Function
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointFunction

from farandole.layout.recording.apply_hook import watch
from farandole.layout.recording.state.restored import process_lock
from farandole.layout.tiles.core.flow import Flow
from farandole.layout.tiles.core.shard_group import ShardGroup
from farandole.layout.tiles.core.tile import Divided, divided_leaves
from farandole.layout.tiles.halo.exchange import all_reduce_shards

_OURS = __name__.partition(".")[0]
_AT_WORK: ContextVar[Flow | None] = ContextVar("farandole.tiles.at_work", default=None)
"""The flow whose model runs in this thread."""


@contextmanager
def at_work(flow: Flow | None) -> Iterator[None]:
    """Inside, custom functions that are given no divided tensor are of this flow's model."""
    token = _AT_WORK.set(flow)
    try:
        yield
    finally:
        _AT_WORK.reset(token)


def watch_custom_functions() -> None:
    """From now on, in this process, a custom function that is given a divided tensor is computed
    whole. It can be called any number of times."""
    watch(_compute_replicated)
    with process_lock():
        _watch_checkpoints()


def _compute_replicated(kind: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    divided = any(isinstance(each, Divided) for each in args)
    divided = divided and not _is_of_checkpoint(kind)
    flow = divided_leaves(args)[0].flow if divided else _flow_for(kind, args)
    if flow is None:
        return NotImplemented
    if kind is CheckpointFunction:
        run, _, *given = args
        return run(*given)
    function = CustomFunction(kind, flow)
    if not divided:
        return function(*args, **kwargs)
    return flow.otherwise(flow, function, args, kwargs)


def _watch_checkpoints() -> None:
    """Those that are no custom functions: `use_reentrant=False`."""
    around: Any = checkpoint._checkpoint_without_reentrant_generator
    if around.__module__ == __name__:
        return

    def runs_once(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        divided = any(isinstance(each, Divided) for each in pytree.tree_leaves((args, kwargs)))
        ours = str(getattr(function, "__module__", "")).partition(".")[0] == _OURS
        if not ours and (divided or _AT_WORK.get() is not None):
            yield
        else:
            yield from around(function, *args, **kwargs)

    checkpoint._checkpoint_without_reentrant_generator = runs_once  # type: ignore[assignment]


def _is_of_checkpoint(kind: type[Function]) -> bool:
    """Whether torch's checkpoint keeps its inputs by it, and looks for them in its node; nothing is
    computed by it. There is such a one until 2.11."""
    return kind.__module__ == checkpoint.__name__ and kind is not CheckpointFunction


def _flow_for(kind: type[Function], args: tuple[Any, ...]) -> Flow | None:
    """Of a call with whole tensors alone: the flow whose shards share its gradient, if there is
    one."""
    flow = _AT_WORK.get()
    if flow is None or kind.__module__.partition(".")[0] == _OURS or _is_of_checkpoint(kind):
        return None
    if kind is CheckpointFunction:  # what it runs may compute with tiles
        return flow
    if flow.shards.all_here:
        return None
    tensors = [each for each in args if isinstance(each, torch.Tensor)]
    differentiable = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
    return flow if differentiable else None


class CustomFunction:
    """A function of whole tensors, the same on every shard, that is differentiated once in all."""

    def __init__(self, kind: type[Function], flow: Flow) -> None:
        self.__name__ = f"{kind.__name__}.apply"
        self._kind = kind
        self._shards = flow.shards

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with at_work(None):  # it is the function itself that is called now
            if self._shards.all_here:
                return self._kind.apply(*args, **kwargs)
            # Invariant: the function's own backward sees the whole gradient of its output. So
            # gradients are added up over the shards where they leave the function's output, and
            # every shard finds the same input gradient. That one is counted on the first shard
            # only, or it would be added up once more further down.
            args = pytree.tree_map_only(torch.Tensor, self._entered, args)
            return pytree.tree_map_only(torch.Tensor, self._left, self._kind.apply(*args, **kwargs))

    def _entered(self, tensor: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _CountedOnce.apply(self._shards.mine[0] == 0, tensor)
        return result

    def _left(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        result: torch.Tensor = _OfAllShards.apply(self._shards, self._shards.next(), tensor)
        return result


class _CountedOnce(Function):
    """Passes the gradient on where it counts. Every shard has found the same one."""

    @staticmethod
    def forward(ctx: Any, counts: bool, tensor: torch.Tensor) -> torch.Tensor:
        ctx.counts = counts
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, gradients[0] if ctx.counts else torch.zeros_like(gradients[0])


class _OfAllShards(Function):
    """Adds up the gradients of all shards in the backward pass."""

    @staticmethod
    def forward(ctx: Any, shards: ShardGroup, number: int, tensor: torch.Tensor) -> torch.Tensor:
        ctx.shards, ctx.number = shards, number
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        shards: ShardGroup = ctx.shards
        groups = [tuple(range(shards.grid.shards))] * shards.grid.shards
        return None, None, all_reduce_shards(shards, ctx.number, True, groups, [gradients[0]])[0]

"""Activations that are computed again in the backward pass instead of kept.

PyTorch's checkpoint does the work. What it leaves open are buffers: BatchNorm would count a batch
twice, and an average that the forward divides by would be a later one. So the second time runs on
copies: of what the buffers were when the first one began, where it has changed them. And what is
kept, the input, can wait in the host's memory: that of a device is the smaller one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from farandole.layout.shards.batch_shard import BatchShard
from farandole.layout.tiles.core.tile import Divided, Tile


def recomputed(
    run: Callable[[Any], Any],
    value: Any,
    module: nn.Module,
    *,
    offload: bool = False,
    to_the_end: bool = False,
) -> Any:
    """`run(value)`, keeping only `value`. Random numbers must be the same when it runs again.

    `offload`: what is kept waits in the host's memory. `to_the_end`: it always runs to its end, and
    not only as far as the backward needs, for others may wait for what it sends.
    """

    buffers = _Buffers(module)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return buffers.first(), buffers.again()

    # Invariant: the second run sees the inputs, the buffers and the random state of the first. On
    # tiles it also makes the same exchanges, in the same order: hence `to_the_end`.
    kept = _OffloadedInput(value) if offload else None
    tensors, put_together = _taken_apart(() if offload else value)
    del value  # or it would stay here too

    def again(*tensors: torch.Tensor) -> Any:
        return run(put_together(tensors) if kept is None else kept.take())

    # Tensors as arguments, not in the function: inside of another checkpoint they are then kept by
    # that one, which computes them again too.
    with set_checkpoint_early_stop(not to_the_end):
        return checkpoint(
            # The random state need not be kept: `StageModule` seeds every block from the pass and
            # not from what was drawn before it.
            again,
            *tensors,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=contexts,
        )


def _taken_apart(
    value: Any,
) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], Any]]:
    """The tensors of a value, those of tiles and shares too, and how to make it of such again."""
    leaves, spec = pytree.tree_flatten(value)
    tensors: list[torch.Tensor] = []
    makers: list[Callable[[Iterator[torch.Tensor]], Any]] = []
    for leaf in leaves:
        if isinstance(leaf, Divided):
            leaf.flow.check()
        if isinstance(leaf, Tile):
            tensors += leaf.pieces
            makers.append(_tile_maker(leaf))
        elif isinstance(leaf, BatchShard):
            tensors.append(leaf.own)
            makers.append(_rows_maker(leaf))
        elif isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            makers.append(next)
        else:
            makers.append(_constant(leaf))

    def put_together(tensors: Sequence[torch.Tensor]) -> Any:
        coming = iter(tensors)
        return pytree.tree_unflatten([make(coming) for make in makers], spec)

    return tensors, put_together


def _tile_maker(tile: Tile) -> Callable[[Iterator[torch.Tensor]], Tile]:
    shell, count = (tile.flow, tile.sizes, tile.axes, tile.margin, tile.sources), len(tile.pieces)

    def make(coming: Iterator[torch.Tensor]) -> Tile:
        flow, sizes, axes, margin, sources = shell
        made = Tile(flow, list(islice(coming, count)), sizes, axes, margin)
        made.sources = sources
        return made

    return make


def _rows_maker(rows: BatchShard) -> Callable[[Iterator[torch.Tensor]], BatchShard]:
    flow, samples, factor = rows.flow, rows.samples, rows.factor
    return lambda coming: BatchShard(flow, next(coming), samples, factor)


def _constant(value: Any) -> Callable[[Iterator[torch.Tensor]], Any]:
    return lambda coming: value


class _OffloadedInput:
    """A value that is here the first time it is taken, and comes back from the host after that."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._first = True

    def take(self) -> Any:
        value = self._value
        if self._first:
            self._first = False
            self._value = pytree.tree_map_only(torch.Tensor, _HostTensor, value)
            return value
        return pytree.tree_map_only(_HostTensor, _HostTensor.back, value)


class _HostTensor:
    """A tensor, or what this shard has of one, in the host's memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._device = tensor.device
        self._differentiable = tensor.requires_grad
        self._value = _each(tensor, lambda piece: piece.detach().cpu())

    def back(self) -> torch.Tensor:
        return _each(self._value, self._returned)

    def _returned(self, piece: torch.Tensor) -> torch.Tensor:
        return piece.to(self._device).requires_grad_(self._differentiable)


def _each(tensor: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    if isinstance(tensor, BatchShard):
        return tensor.like(function(tensor.own))
    return tensor.map(function) if isinstance(tensor, Tile) else function(tensor)


class _Buffers:
    """The buffers of a module that runs twice."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._began: dict[tuple[nn.Module, str], torch.Tensor] = {}
        """What the first time began with, of buffers that it has changed."""

    @contextmanager
    def first(self) -> Iterator[None]:
        before = [
            (part, name, buffer, buffer._version, buffer.detach().clone())
            for part, name, buffer in self._all()
            # A norm in training does not read its statistics.
            if not isinstance(part, _NormBase)
        ]
        yield
        for part, name, buffer, version, copy in before:
            replaced = part._buffers.get(name) is not buffer
            if replaced or buffer._version != version or _differ(buffer, copy):
                self._began[part, name] = copy

    @contextmanager
    def again(self) -> Iterator[None]:
        """Its own buffers stay what they are: the graph of a later batch may hold on to them."""
        own = [
            (part, name, buffer)
            for part, name, buffer in self._all()
            if (part, name) in self._began or isinstance(part, _NormBase)
        ]
        for part, name, buffer in own:
            # Once more a copy: with several backwards through it, it runs more than twice.
            part._buffers[name] = self._began.get((part, name), buffer).detach().clone()
        try:
            yield
        finally:
            for part, name, buffer in own:
                part._buffers[name] = buffer

    def _all(self) -> list[tuple[nn.Module, str, torch.Tensor]]:
        return [
            (part, name, buffer)
            for part in self._module.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]


def _differ(buffer: torch.Tensor, copy: torch.Tensor) -> bool:
    """Written past autograd, which counts writes; a GPU is not waited for to find out."""
    return buffer.device.type == "cpu" and not torch.equal(buffer, copy)

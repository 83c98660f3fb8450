"""Measures what each block of a model needs: time, what travels, what is kept, what is learnt.

Block after block, forward and backward, each on what the one before it returned. So no more than
one block's activations exist at a time, and a model can be measured that could not be trained in
one piece. The model is left as it was: buffers, gradients and the random state are put back.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map

from farandole.errors import UserError
from farandole.layout.arguments import call
from farandole.layout.partition.blocks import Block
from farandole.layout.partition.cost import BlockProfile
from farandole.layout.recording.state.restored import state_restored

_SECONDS_PER_PARAMETER = 1e-9
"""Only the proportions matter."""


def profile_blocks(
    blocks: Sequence[Block],
    sample: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    repeats: int = 3,
) -> list[BlockProfile]:
    """Measures every block on one (micro-)batch, on the devices where block and batch are.

    The blocks run in the mode that they are in. `loss`, of the output of the last block, counts as
    part of that block. Times are medians over `repeats`, after one round to warm up.

    Raises `UserError` naming the block if one fails.
    """
    if repeats < 1:
        raise UserError(f"profile_blocks: repeats={repeats}; give at least 1.")
    profiles = []
    value, saved_before = sample, dict[int, int]()
    with state_restored([block.module for block in blocks]):
        for index, block in enumerate(blocks):
            run: Callable[[Any], Any] = partial(call, block.module)
            if loss is not None and index == len(blocks) - 1:
                run = _then(run, loss)
            try:
                measured = _measure(block.module, run, value, repeats)
            except Exception as error:
                raise UserError(
                    f"Block {index} ({block.name}) fails on what it is given "
                    f"({_shapes(value)}): {error}"
                ) from error
            received = {_storage(tensor) for tensor in _tensors(value)}
            shared = received & saved_before.keys() & measured.saved.keys()
            profiles.append(
                BlockProfile(
                    name=block.name,
                    forward_seconds=measured.forward_seconds,
                    backward_seconds=measured.backward_seconds,
                    output_bytes=sum(tensor.nbytes for tensor in _tensors(measured.output)),
                    saved_bytes=sum(measured.saved.values()),
                    parameter_bytes=_parameter_bytes(block.module),
                    shared_bytes=sum(measured.saved[storage] for storage in shared),
                )
            )
            value, saved_before = measured.output, measured.saved
    return profiles


def parameters_only(blocks: Sequence[Block]) -> list[BlockProfile]:
    """A guess without a sample: time in proportion to the number of parameters."""
    counts = [sum(each.numel() for each in block.module.parameters()) for block in blocks]
    return [
        BlockProfile(
            name=block.name,
            forward_seconds=count * _SECONDS_PER_PARAMETER,
            backward_seconds=2 * count * _SECONDS_PER_PARAMETER,
            output_bytes=0,
            saved_bytes=0,
            parameter_bytes=_parameter_bytes(block.module),
        )
        for block, count in zip(blocks, counts, strict=True)
    ]


def _then(block: Callable[[Any], Any], loss: Callable[[Any], Tensor]) -> Callable[[Any], Any]:
    return lambda value: loss(block(value))


class _Measured(NamedTuple):
    forward_seconds: float
    backward_seconds: float
    saved: dict[int, int]  # by storage: bytes
    output: Any  # cut off from autograd


def _measure(module: nn.Module, run: Callable[[Any], Any], value: Any, repeats: int) -> _Measured:
    own = {_storage(tensor) for tensor in (*module.parameters(), *module.buffers())}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        # Weights are kept in any case, and counted by themselves.
        if _storage(tensor) not in own:
            saved[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        output = run(_cut_off(value))
    # The next block gets this one: only it can be told apart by its storage from what was saved.
    returned = _cut_off(output)
    _backward(output)
    now = _clock([*module.parameters(), *_tensors(value)])
    forward, backward = [], []
    for _ in range(repeats):
        received = _cut_off(value)
        begin = now()
        output = run(received)
        turn = now()
        _backward(output)
        forward.append(turn - begin)
        backward.append(now() - turn)
    for parameter in module.parameters():
        parameter.grad = None  # or the gradients of all blocks would pile up
    return _Measured(statistics.median(forward), statistics.median(backward), saved, returned)


def _backward(output: Any) -> None:
    tensors = [tensor for tensor in _tensors(output) if tensor.requires_grad]
    if tensors:
        torch.autograd.backward(tensors, [torch.ones_like(tensor) for tensor in tensors])


def _clock(tensors: Sequence[Tensor]) -> Callable[[], float]:
    """A clock that first waits for the devices where these tensors are."""
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}

    def now() -> float:
        for device in devices:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


def _cut_off(value: Any) -> Any:
    """The same values, not connected to what they were computed from."""
    return tree_map(
        lambda leaf: (
            leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
        ),
        value,
    )


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _parameter_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def _shapes(value: Any) -> str:
    shapes = [f"{tuple(each.shape)} {str(each.dtype)[6:]}" for each in _tensors(value)]
    return ", ".join(shapes) or type(value).__name__

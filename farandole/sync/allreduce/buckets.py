"""Gradients side by side in flat buffers, so that many small ones travel as few large ones.

    buffer   │ gradient of w₁ │ gradient of w₂ │ … │ has w₁ one? │ … │ rank 0's note │ … │

A parameter may get no gradient in a backward pass: on no rank, or on some ranks only. Behind the
gradients each bucket carries a flag for each of its parameters, 1 or 0, that is averaged with
them. Above 0 afterwards, some rank had a gradient, and the average counts the others as zeros; at 0
nobody had, and the parameter is left alone, as in a process that trains alone.

The notes come last, one for each rank: 0, or NaN where that rank's gradients were not finite. After
the average all ranks hold the same NaN in a gradient, and the notes still tell whose it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from farandole.comm.tensors import is_dense

_MIB = 2**20
# As DDP has it: a small first bucket, so that the exchange begins early.
_FIRST_BYTES = _MIB
_LATER_BYTES = 25 * _MIB
_DENSE = torch.strided


class UnfitGradientError(Exception):
    """A gradient is sparse, or can be differentiated again."""

    def __init__(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        super().__init__()
        self.parameter = parameter
        self.gradient = gradient


@dataclass(frozen=True)
class Bucket:
    """Some parameters of one dtype on one device, and room for their gradients."""

    index: int  # the order in which all ranks reduce the buckets of a model
    is_last: bool  # of the buckets of a model
    is_final: bool  # False for those of the first pass, which are packed again after it
    names: list[str]
    parameters: list[nn.Parameter]
    buffer: torch.Tensor
    """The gradients and the flags; complex numbers as pairs of real ones."""
    gradients: list[torch.Tensor]
    """Views of the buffer, in the shapes and strides of the parameters."""
    parts: list[torch.Tensor]
    """The same places in the buffer, in a row: nobody else has these."""
    offsets: list[int]
    """Of those places, in bytes."""
    has_gradient: torch.Tensor
    """The flags: a view of the buffer."""
    notes: torch.Tensor
    """One for each rank, NaN where its gradients were not finite: a view of the buffer."""
    trailer: torch.Tensor
    """The flags and the notes: a view of the buffer."""
    body: torch.Tensor
    """All but the trailer: a view of the buffer."""
    note_of: list[torch.Tensor]
    """The note of each rank: views of the buffer."""

    def fill(self) -> None:
        """Copies what the parameters have accumulated; a missing gradient counts as zeros.

        Raises `UnfitGradientError` for one that cannot be copied into a buffer.
        """
        self._keep_views()
        views, gradients, missing = [], [], []
        for place, parameter in enumerate(self.parameters):
            gradient, view = parameter.grad, self.gradients[place]  # once: each look is a call
            # After `hand_out` the gradient is the view itself, unless the script has set it to None
            # since. Autograd then accumulates into the buffer, and there is nothing to copy.
            if gradient is view:
                continue
            if gradient is None:
                missing.append(place)
                view.zero_()
                continue
            if gradient.layout is not _DENSE or gradient.requires_grad:
                raise UnfitGradientError(parameter, gradient)
            views.append(view)
            gradients.append(gradient)
        if views:
            torch._foreach_copy_(views, gradients)
        if missing:
            flags = torch.ones(len(self.parameters), dtype=self.has_gradient.dtype)
            flags[missing] = 0.0
            self.has_gradient.copy_(flags)
        else:
            self.has_gradient.fill_(1.0)

    def _keep_views(self) -> None:
        """Makes a view anew that is none any more: the script has set `parameter.grad.data`, and
        the parameter's gradient was the view itself."""
        begin = self.buffer.data_ptr()  # another one, once the memory is registered
        if [view.data_ptr() - begin for view in self.gradients] == self.offsets:
            return
        for place, view in enumerate(self.gradients):
            if view.numel() and view.data_ptr() != begin + self.offsets[place]:
                self.gradients[place] = _like(self.parameters[place], self.parts[place])

    def note(self, rank: int) -> None:
        """Writes down, for all ranks to read, whether this rank's gradients are finite.

        Does not wait for a GPU. Finite numbers that add up to more than their dtype can hold leave
        a note too, so a note says where to look and proves nothing.
        """
        # A sum times 0 is 0 or NaN, without a branch that would need the value on the host.
        self.notes.zero_()
        note = self.note_of[rank]
        torch.sum(self.body, 0, out=note)
        note.mul_(0)

    def noted(self) -> list[int]:
        """The ranks whose gradients were not finite. Waits for a GPU."""
        return [rank for rank, note in enumerate(self.notes.tolist()) if note != 0]

    def hand_out(self) -> None:
        """Makes the averages the parameters' gradients, where any rank had one."""
        flags: list[bool] | None = None
        for place, parameter in enumerate(self.parameters):
            gradient, view = parameter.grad, self.gradients[place]
            if gradient is view:
                continue
            if gradient is None:
                if flags is None:  # reading flags waits for a GPU, so only where one is needed
                    flags = (self.has_gradient > 0).tolist()
                if not flags[place]:
                    continue
            parameter.grad = view


def pack(
    parameters: Sequence[tuple[str, nn.Parameter]],
    bucket_mib: float | None = None,
    *,
    ranks: int = 0,
    final: bool = True,
) -> list[Bucket]:
    """Buckets for gradients that are expected in the order of `parameters`.

    They are filled in that order, and come out in the order in which they are complete. There is
    room for the notes of `ranks`.
    """
    limits = (_FIRST_BYTES, _LATER_BYTES) if bucket_mib is None else (int(bucket_mib * _MIB),) * 2
    closed: list[list[tuple[str, nn.Parameter]]] = []
    open_: dict[tuple[torch.dtype, torch.device], list[tuple[str, nn.Parameter]]] = {}
    held_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
    for name, parameter in parameters:
        kind = (parameter.dtype, parameter.device)
        open_.setdefault(kind, []).append((name, parameter))
        held_bytes[kind] = held_bytes.get(kind, 0) + parameter.nbytes
        # Sizes and order decide, both the same on all ranks: so all cut the same buckets.
        if held_bytes[kind] >= limits[bool(closed)]:
            closed.append(open_.pop(kind))
            del held_bytes[kind]
    closed.extend(open_.values())
    return [
        _bucket(index, index == len(closed) - 1, final, content, ranks)
        for index, content in enumerate(closed)
    ]


def _bucket(
    index: int,
    is_last: bool,
    is_final: bool,
    content: list[tuple[str, nn.Parameter]],
    ranks: int,
) -> Bucket:
    names = [name for name, _ in content]
    parameters = [parameter for _, parameter in content]
    first = parameters[0]
    counts = [_real(parameter).numel() for parameter in parameters]
    trailer = len(counts) + ranks
    buffer = torch.zeros(sum(counts) + trailer, dtype=first.dtype.to_real(), device=first.device)
    *parts, flags, notes = buffer.split([*counts, len(counts), ranks])
    gradients = [_like(parameter, part) for parameter, part in zip(parameters, parts, strict=True)]
    return Bucket(
        index,
        is_last,
        is_final,
        names,
        parameters,
        buffer,
        gradients,
        parts,
        [begin * buffer.itemsize for begin in itertools.accumulate([0, *counts[:-1]])],
        flags,
        notes,
        buffer[-trailer:],
        buffer[:-trailer],
        list(notes.unbind()),
    )


def _real(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _like(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A part of a buffer in a parameter's shape and strides, as fused optimizers need it."""
    real = _real(parameter)
    # A parameter with gaps or overlaps (an expanded one) has strides that reach beyond the part.
    strides = real.stride() if is_dense(real) else torch.empty(real.shape, device="meta").stride()
    view = part.as_strided(real.shape, strides)
    return torch.view_as_complex(view) if parameter.is_complex() else view

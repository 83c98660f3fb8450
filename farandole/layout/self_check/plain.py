"""What the plain model computes by itself, for a comparison with a layout.

A copy of the model as the user gave it, before it is taken apart. Like a layout with micro-batches,
it adds up gradients over them, each weighed by its share of the batch.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import psutil
import torch
from torch import nn

from farandole.layout.arguments import call
from farandole.layout.objective import Objective, one_number
from farandole.layout.pipeline.micro import Micro
from farandole.layout.recording.saved_tensors import saved_tensors_noted
from farandole.layout.recording.surroundings import drawn_elsewhere
from farandole.layout.self_check.draws import ExpectedDraws, UnknownDrawError
from farandole.layout.self_check.swapped import swapped, tensors_of

_SHARE_OF_MEMORY = 0.4  # of what is free, for the activations of a micro-batch


class CannotCheckError(Exception):
    """The plain model cannot be run here, or not be compared; the message says why."""


class Computed(NamedTuple):
    """Of two passes over a batch, added up."""

    loss: float
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    rounding: dict[str, float]  # by how much a gradient changes when weights change by rounding


class PlainModel:
    """Holds a copy. Raises `CannotCheckError` if there can be none."""

    def __init__(self, model: nn.Module, objective: Objective, device: torch.device) -> None:
        self._objective = objective
        self._device = device
        needed = sum(each.nbytes for each in tensors_of(model).values())
        if needed > _SHARE_OF_MEMORY * psutil.virtual_memory().available:
            raise CannotCheckError("there is not enough memory for a copy of the plain model")
        try:
            self.model = copy.deepcopy(model)
        except Exception as error:
            raise CannotCheckError(f"the model cannot be copied ({_said(error)})") from error

    def compute(self, micros: Sequence[Micro], passes: int, dtype: torch.dtype | None) -> Computed:
        """Raises `CannotCheckError`. The copy is left as it was, for another attempt."""
        self.model.to(self._device)
        with swapped(self.model, dtype):
            before = drawn_elsewhere()
            loss = self._passes(micros, passes)
            if drawn_elsewhere() != before:
                raise CannotCheckError("the model draws from Python's or NumPy's random numbers")
            gradients = {
                name: None if each.grad is None else each.grad.detach().clone()
                for name, each in self.model.named_parameters()
            }
            buffers = {name: each.detach().clone() for name, each in self.model.named_buffers()}
        return Computed(loss, gradients, buffers, self._rounding(micros, passes, dtype, gradients))

    def run_once(self, micros: Sequence[Micro], dtype: torch.dtype | None) -> None:
        """For whoever watches its layers."""
        with swapped(self.model, dtype):
            self._passes(micros, 1)

    def _passes(self, micros: Sequence[Micro], passes: int) -> float:
        total = 0.0
        try:
            with ExpectedDraws(), torch.enable_grad():
                for _ in range(passes):
                    for micro in micros:
                        with saved_tensors_noted(self._counted()):
                            output = call(self.model, micro.inputs)
                            loss = one_number(self._objective.of(output, micro.targets))
                        total += float(loss.detach()) * micro.weight
                        (loss * micro.weight).backward()
        except UnknownDrawError as error:
            raise CannotCheckError(f"the model draws random numbers by {error}") from error
        except CannotCheckError:
            raise
        except Exception as error:
            raise CannotCheckError(f"the plain model fails on it ({_said(error)})") from error
        return total

    def _rounding(
        self,
        micros: Sequence[Micro],
        passes: int,
        dtype: torch.dtype | None,
        gradients: dict[str, torch.Tensor | None],
    ) -> dict[str, float]:
        """In double precision rounding is far below any mistake, and need not be measured."""
        if all(each is None or each.dtype is torch.float64 for each in gradients.values()):
            return {}
        with swapped(self.model, dtype):
            for each in self.model.parameters():
                if each.is_floating_point():
                    # A generator of its own: the process's random state is part of what must not
                    # change, and the result is the same in every run.
                    generator = torch.Generator(each.device).manual_seed(each.numel())
                    signs = torch.randint(
                        -1, 2, each.shape, generator=generator, device=each.device
                    )
                    each.data.mul_(1 + signs * torch.finfo(each.dtype).eps)
            self._passes(micros, passes)
            changes = {}
            for name, each in self.model.named_parameters():
                known = gradients[name]
                if known is not None and each.grad is not None and known.numel():
                    changes[name] = float((each.grad - known).abs().max())
        return changes

    def _counted(self) -> Any:
        """Refuses to keep more activations for the backward pass than there is memory for."""
        seen: set[int] = set()
        room = _SHARE_OF_MEMORY * _free_bytes(self._device)
        taken = 0

        def keep(place: int, size: int) -> None:
            nonlocal taken
            if place not in seen:
                seen.add(place)
                taken += size
            if taken > room:
                raise CannotCheckError(
                    f"the plain model's activations take more than {room / 2**30:.1f} GiB, the "
                    "memory that a check may use here"
                )

        return keep


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(psutil.virtual_memory().available)


def _said(error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"

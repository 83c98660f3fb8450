"""Many tensors as few: side by side in one buffer for each dtype and device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from farandole.comm.tensors import is_finite


class Flat:
    """Holds copies of `tensors` in flat buffers; `gather` and `scatter` copy in and out.

    The buffers come in an order that depends on names, dtypes and devices only. Ranks with the same
    model have the same buffers, and can reduce them one by one.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)
        self.buffers: list[torch.Tensor] = []
        self.views: dict[str, torch.Tensor] = {}
        """Each tensor's place in a buffer, in its shape; complex numbers as pairs of real ones."""
        real = {name: _real(tensor) for name, tensor in tensors.items()}
        for kind in dict.fromkeys((tensor.dtype, tensor.device) for tensor in real.values()):
            alike = {n: t for n, t in real.items() if (t.dtype, t.device) == kind}
            counts = [tensor.numel() for tensor in alike.values()]
            buffer = torch.zeros(sum(counts), dtype=kind[0], device=kind[1])
            self.buffers.append(buffer)
            for (name, tensor), part in zip(alike.items(), buffer.split(counts), strict=True):
                self.views[name] = part.view(tensor.shape)

    def holds(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether these are the very tensors that the buffers were made for."""
        return list(self._tensors) == list(tensors) and all(
            mine is theirs and _real(mine).shape == self.views[name].shape
            for (name, mine), theirs in zip(self._tensors.items(), tensors.values(), strict=True)
        )

    def gather(self) -> None:
        """Copies every tensor into its place."""
        _copy(list(self.views.values()), self._real_tensors())

    def scatter(self) -> None:
        """Copies every place back into its tensor."""
        _copy(self._real_tensors(), list(self.views.values()))

    @torch.no_grad()
    def pull(self, share: float) -> None:
        """Moves every tensor by `share` of the way towards its copy in the buffers."""
        torch._foreach_lerp_(self._real_tensors(), list(self.views.values()), share)

    def copies(self) -> list[torch.Tensor]:
        return [buffer.clone() for buffer in self.buffers]

    def carry_over(self, before: Flat, copies: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Lays out `copies`, which have the layout of `before`, as this object does.

        Tensors that `before` did not hold are copied as they are now.
        """
        for buffer, copy in zip(before.buffers, copies, strict=True):
            buffer.copy_(copy)
        self.gather()
        for name, view in before.views.items():
            if name in self.views and self.views[name].shape == view.shape:
                self.views[name].copy_(view)
        return self.copies()

    def is_finite(self) -> bool:
        return all(is_finite(buffer) for buffer in self.buffers)

    def first_not_finite(self) -> str | None:
        """The name of the first place that holds a NaN or an infinity."""
        return next((name for name, view in self.views.items() if not is_finite(view)), None)

    def _real_tensors(self) -> list[torch.Tensor]:
        return [_real(self._tensors[name]) for name in self.views]


def weights_of(model: nn.Module, known: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """The parameters that are trained, or once were (`known`).

    Those that were never trained are the same on all ranks.
    """
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad or name in known
    }


def statistics_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The running means and variances of normalising layers.

    Other buffers are constants or belong to the script: the mean of two masks is not a mask.
    """
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        if isinstance(module, _NormBase)
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.is_floating_point()
    }


@torch.no_grad()
def load_buffers(model: nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(saved[name])


def moments_of(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """What the optimizer remembers of each parameter, such as momentum; counters are left out."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        f"{index}.{name}": value
        for index, parameter in enumerate(parameters)
        for name, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
        and (value.is_floating_point() or value.is_complex())
        and (value.dim() or not parameter.dim())  # else a counter
        and name != "step"
    }


@torch.no_grad()
def _copy(into: list[torch.Tensor], out_of: list[torch.Tensor]) -> None:
    if into:
        torch._foreach_copy_(into, out_of)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor

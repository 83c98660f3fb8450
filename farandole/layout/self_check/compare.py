"""Compares what every rank of a replica holds with what the plain model computed on its first rank.

Tolerances are far above rounding and far below any mistake: in double precision by a fixed factor,
otherwise by how much the plain model's own gradients change when its weights are rounded otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from farandole.comm import Group
from farandole.layout.pipeline.pipelined import Pipelined
from farandole.layout.self_check.plain import Computed
from farandole.layout.self_check.swapped import tensors_of
from farandole.layout.tiles.core.tiling import Tiling


class RankPart(NamedTuple):
    """What this rank holds of the model."""

    pipelined: Pipelined
    bridge: nn.Module
    names: Mapping[str, str]  # of the gradient bridge's tensors: their names in the whole model
    layers: Mapping[str, nn.Module]  # of the whole model, as far as they are here
    tilings: Mapping[int, Tiling]


class Difference(NamedTuple):
    """`off`: the largest difference, by the largest number in what it should be."""

    kind: str
    name: str
    off: float


def by_whole_name(held: RankPart) -> dict[str, torch.Tensor]:
    return {
        held.names[name]: tensor
        for name, tensor in tensors_of(held.bridge).items()
        if name in held.names
    }


def from_first(
    pipe: Group, device: torch.device, tensors: Mapping[str, torch.Tensor] | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """*Together.* What the first rank has by name, one after the other, on every rank."""
    described = [
        [name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
        for name, tensor in (tensors or {}).items()
    ]
    for name, shape, dtype in pipe.broadcast_json(described):
        if tensors is not None:
            tensor = tensors[name].detach().to(device).contiguous()
        else:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        yield name, pipe.broadcast(tensor)


class Tolerance(NamedTuple):
    """`scale`: the largest number in any gradient. `rounding`: by weight; empty in double."""

    scale: float
    rounding: Mapping[str, float]

    @property
    def precise(self) -> bool:
        return not self.rounding

    def of_gradient(self, name: str, largest: float) -> float:
        if self.precise:
            return 1e-7 * largest + 1e-9 * self.scale
        return 1000 * self.rounding.get(name, 0.0) + 1e-3 * largest + 1e-5 * self.scale

    def of_loss(self, expected: float) -> float:
        return (1e-9 if self.precise else 1e-3) * max(abs(expected), 1e-12)

    @property
    def relative(self) -> float:
        return 1e-7 if self.precise else 1e-3


def share_tolerance(pipe: Group, computed: Computed | None) -> Tolerance:
    """*Together.*"""
    if computed is None:
        return Tolerance(*pipe.broadcast_json(None))
    largest = [
        float(each.abs().max())
        for each in computed.gradients.values()
        if each is not None and each.numel()
    ]
    return Tolerance(*pipe.broadcast_json([max(largest, default=0.0), computed.rounding]))


def compare_gradients(
    held: RankPart, computed: Computed | None, tolerance: Tolerance
) -> list[Difference]:
    """*Together.* Of the weights that this rank holds. No gradient counts as one of zeros."""
    pipe, device = held.pipelined.pipe, held.pipelined.device
    expected_here = None
    if computed is not None:
        expected_here = {
            name: torch.zeros((), dtype=torch.float64) if each is None else each
            for name, each in computed.gradients.items()
        }
    mine = by_whole_name(held)
    found = []
    for name, expected in from_first(pipe, device, expected_here):
        if name not in mine or not mine[name].requires_grad or not mine[name].numel():
            continue
        gradient = mine[name].grad
        # A pipeline may leave out the gradient of an unused weight where the plain model has zeros,
        # and the other way round. As values they are equal.
        off = expected if gradient is None else gradient - expected
        largest = float(expected.abs().max())
        most = float(off.abs().max())
        # Written with `not … <=`, so that NaN counts as a difference.
        if not most <= tolerance.of_gradient(name, largest) and bool(expected.isfinite().all()):
            found.append(Difference("gradient", name, most / largest if largest else float("inf")))
    return found


def compare_buffers(
    held: RankPart,
    computed: Computed | None,
    tolerance: Tolerance,
) -> list[Difference]:
    """*Together.* Of the buffers that this rank holds.

    Where several ranks hold a stage, each sees some of the micro-batches. Normalisation's running
    statistics are averaged over them, by design; whatever else moves would come apart.
    """
    pipe, device = held.pipelined.pipe, held.pipelined.device
    mine = by_whole_name(held)
    averaged = _statistics(held) if _is_averaged(held) else set()
    found = []
    buffers = None if computed is None else computed.buffers
    for name, expected in from_first(pipe, device, buffers):
        # All ranks iterate over all tensors, also over those that they do not hold: each is a
        # broadcast.
        if name not in mine or name in averaged:
            continue
        if _differs(mine[name], expected, tolerance.relative):
            found.append(Difference("buffer", name, float("nan")))
    return found


def _differs(one: torch.Tensor, other: torch.Tensor, close: float) -> bool:
    if one.shape != other.shape:
        return True
    if not other.is_floating_point():
        return not torch.equal(one.to(other.dtype), other)
    largest = float(other.abs().max()) if other.numel() else 0.0
    return not torch.allclose(
        one.double(), other.double(), rtol=close, atol=close * largest, equal_nan=True
    )


def _is_averaged(held: RankPart) -> bool:
    """Whether running statistics move with the update, or by a share of the micro-batches."""
    layout = held.pipelined.layout
    turns = layout.mirrored or max(layout.replicas, default=1) > 1
    return turns or layout.batchnorm == "deferred"


def _statistics(held: RankPart) -> set[str]:
    paths = {
        f"{path}.{name}" if path else name
        for path, module in held.bridge.named_modules(remove_duplicate=False)
        if isinstance(module, _NormBase)
        for name, _ in module.named_buffers(recurse=False)
    }
    return {held.names[path] for path in paths if path in held.names}

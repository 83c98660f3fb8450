"""Normalisation of every sample alone, with statistics over all tiles.

As in `batchnorm`, what a shard holds beyond its own part gets outputs, but does not count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from farandole.errors import UserError
from farandole.layout.tiles.core.flow import Flow
from farandole.layout.tiles.core.frames import Frame, aligned, frame_of, tile_of
from farandole.layout.tiles.core.grid import relative
from farandole.layout.tiles.core.intervals import Interval
from farandole.layout.tiles.core.tile import Tile
from farandole.layout.tiles.halo.windows import as_needs
from farandole.layout.tiles.ops.batchnorm import batch_norm
from farandole.layout.tiles.ops.normalised import NormalisationTask, normalised


def group_norm(
    flow: Flow,
    input: Tile,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> Tile:
    """`F.group_norm`."""
    return _by_groups(flow, input, num_groups, weight, bias, eps)[0]


def instance_norm(
    flow: Flow,
    input: Tile,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tile:
    """`F.instance_norm`: every channel is a group."""
    if not use_input_stats:
        return batch_norm(flow, input, running_mean, running_var, weight, bias, eps=eps)
    values = math.prod(input.sizes[1:])
    if values == 1:
        raise UserError(
            f"{flow.layer}: an instance has one value for each channel, and needs at least two to "
            "learn from: take larger images, or evaluate."
        )
    result, mean, variance = _by_groups(flow, input, input.sizes[0], weight, bias, eps)
    with torch.no_grad():
        for running, found in (
            (running_mean, mean),
            (running_var, variance * (values / (values - 1))),
        ):
            if running is not None:
                # As torch does: running statistics are the mean over the samples' own.
                over_samples = found.reshape(found.shape[:2]).mean(0).to(running.dtype)
                running.mul_(1 - momentum).add_(over_samples, alpha=momentum)
    return result


def layer_norm(
    flow: Flow,
    input: Tile,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """`F.layer_norm`; each shard for itself, if it has whole what is normalised."""
    count = len(input.axes) + 1
    dims = tuple(range(count - len(normalized_shape), count))
    if tuple(input.shape[dims[0] :]) != tuple(normalized_shape):
        raise UserError(
            f"{flow.layer}: a LayerNorm over {tuple(normalized_shape)} does not fit a tensor of "
            f"shape {tuple(input.shape)}."
        )
    if 0 in dims:
        return flow.otherwise(flow, F.layer_norm, (input, normalized_shape, weight, bias, eps), {})
    if not any(input.is_divided(at) for at in dims):
        return input.map(
            lambda piece: F.layer_norm(piece, tuple(normalized_shape), weight, bias, eps)
        )
    # Shards add up what they know of the same positions: beyond their own, not all know the same.
    margin = tuple(each if at + 1 in dims else (0, 0) for at, each in enumerate(input.margin))
    frame = frame_of(input)._replace(margin=margin)
    pieces = aligned(flow, input, frame)

    def cut(tensor: torch.Tensor | None, shard: int) -> torch.Tensor | None:
        inside = frame.held(flow, shard)[dims[0] - 1 :]
        return None if tensor is None else tensor[tuple(each.slice for each in inside)]

    mine = flow.shards.mine
    job = _job(flow, frame, dims, math.prod(normalized_shape), eps)
    weights = [cut(weight, shard) for shard in mine]
    biases = [cut(bias, shard) for shard in mine]
    return tile_of(flow, frame, normalised(job, pieces, weights, biases)[0])


def rms_norm(
    flow: Flow,
    input: Tile,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> Any:
    """`F.rms_norm`, if every shard has whole what is normalised."""
    count = len(input.axes) + 1
    shape = tuple(normalized_shape)
    first = count - len(shape)
    if first < 1 or any(input.is_divided(at) for at in range(first, count)):
        return flow.otherwise(flow, F.rms_norm, (input, shape, weight, eps), {})
    return input.map(lambda piece: F.rms_norm(piece, shape, weight, eps))


def local_response_norm(
    flow: Flow,
    input: Tile,
    size: int,
    alpha: float = 1e-4,
    beta: float = 0.75,
    k: float = 1.0,
) -> Tile:
    """`F.local_response_norm`: a window over channels, so their neighbours may be elsewhere."""
    before, after = size // 2, (size - 1) // 2
    needs = []
    for shard in range(flow.grid.shards):
        channels, *rest = input.held(shard)
        # May reach beyond the first or last channel. Those are filled with zeros, as torch does.
        near = Interval(channels.start - before, channels.stop + after)
        needs.append(as_needs((near if channels.length else channels, *rest)))
    pieces = []
    for source, piece in zip(input.collect(needs), input.pieces, strict=True):
        if not piece.numel():
            pieces.append(source.narrow(1, 0, piece.shape[1]))
            continue
        squares = (source * source).flatten(2).unsqueeze(1)
        mean = F.avg_pool2d(squares, (size, 1), stride=1).reshape(piece.shape)
        pieces.append(source.narrow(1, before, piece.shape[1]) / (mean * alpha + k).pow(beta))
    return input.like(pieces)


def _by_groups(
    flow: Flow,
    input: Tile,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[Tile, torch.Tensor, torch.Tensor]:
    """The input with every group of channels normalised; mean and variance of all groups."""
    channels, *image = input.sizes
    if channels % groups:
        raise UserError(f"{flow.layer}: {channels} channels cannot be put in {groups} groups.")
    frame = frame_of(input)
    dims = tuple(range(1, len(input.axes) + 1))
    values = channels // groups * math.prod(image)
    mine = flow.shards.mine
    spans = [input.held(shard)[0] for shard in mine]
    job = _job(flow, frame, dims, values, eps)._replace(
        groups=groups,
        group_of=[
            torch.arange(span.start, span.stop, device=input.device) // (channels // groups)
            for span in spans
        ],
    )

    def cut(tensor: torch.Tensor | None, span: Interval) -> torch.Tensor | None:
        return None if tensor is None else tensor[span.slice].reshape(-1, *(1,) * len(image))

    weights = [cut(weight, span) for span in spans]
    biases = [cut(bias, span) for span in spans]
    results, mean, variance = normalised(job, input.pieces, weights, biases)
    return input.like(results), mean, variance


def _job(
    flow: Flow, frame: Frame, dims: tuple[int, ...], values: int, eps: float
) -> NormalisationTask:
    grid, mine = flow.grid, flow.shards.mine
    return NormalisationTask(
        flow.shards,
        flow.shards.next(),
        grid.groups_along([frame.axes[at - 1] for at in dims]),
        dims,
        [
            relative(grid.owned(shard, frame.sizes, frame.axes), frame.held(flow, shard))
            for shard in mine
        ],
        0,
        [],
        values,
        eps,
    )

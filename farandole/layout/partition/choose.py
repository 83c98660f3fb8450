"""Fills in what a layout leaves open: where to cut, and with `stages=auto` into how many.

Rank 0 measures the blocks and two ranks measure the link. All ranks get the same numbers, so they
choose the same cut. Without a sample there is nothing to measure, and the parameters are divided
evenly.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import fx

from farandole.comm import Group
from farandole.comm.calibration import link_between
from farandole.errors import UserError
from farandole.layout.layout import Layout
from farandole.layout.option_groups import TileOptions
from farandole.layout.partition.blocks import Block
from farandole.layout.partition.cost import BlockProfile, Cut
from farandole.layout.partition.network import Component, Network
from farandole.layout.partition.profile import parameters_only, profile_blocks
from farandole.layout.partition.search import cut_by_hand, find_cut
from farandole.layout.partition.text import describe, suggestion, unevenness
from farandole.layout.pipeline.micro import cut_batch
from farandole.layout.recording.cut_graph import WHOLE
from farandole.schedule.pipelines import facts, peak_bytes

_GIB = 2**30
_TRAINING_COPIES = 2  # beside the weights themselves: the gradient, and what an optimizer keeps


class Choice(NamedTuple):
    """A layout with nothing left open, why, and what it needs."""

    layout: Layout
    text: str
    activation_bytes: list[float] | None  # by place, as predicted; None without measurements


def choose(
    layout: Layout, blocks: Sequence[Block], world: Group, sample: Any, device: torch.device
) -> Choice:
    """*Together.* `sample`: the model's arguments for a batch, or None."""
    _check_can_choose(layout, blocks, sample)
    stages = layout.stages
    profiles = _profiles(layout, blocks, world, sample, device)
    network = _network(world) if sample is not None else Network(1e30)
    batches = layout.microbatches
    limit = None if layout.memory_gib is None else layout.memory_gib * _GIB
    if layout.balance:
        cut = cut_by_hand(
            profiles,
            layout.balance,
            network,
            replicas=layout.replicas or None,
            batches_per_sync=batches,
        )
    else:
        in_flight, copies = _held(layout)
        cut = find_cut(
            profiles,
            world.size if stages == "auto" else sum(layout.replicas) or stages,
            network,
            stages=None if stages == "auto" or layout.replicas else stages,
            replicas=layout.replicas or None,
            memory_bytes=limit,
            in_flight=in_flight,
            weight_copies=copies,
            batches_per_sync=batches,
        )
    chosen = _filled_in(layout, cut)
    activations = None
    text = ""
    if not layout.balance and stages != 1:
        text = "cut by parameters alone: pass sample=x, the inputs of a batch, to measure"
    if sample is not None:
        activations, memory = _memory(chosen, profiles, cut)
        _require_room(chosen, memory, limit)
        text = describe(cut, profiles)
        if layout.balance:
            better = suggestion(
                profiles,
                layout.balance,
                network,
                replicas=layout.replicas or None,
                batches_per_sync=batches,
            )
            text += f"\n{better}" if better is not None else ""
    if not layout.balance:
        whole = [
            block.module.meta.get(WHOLE, {}) if isinstance(block.module, fx.GraphModule) else {}
            for block in blocks
        ]
        warning = unevenness(cut, profiles, whole, measured=sample is not None)
        text += f"\n{warning}" if warning is not None else ""
    return Choice(chosen, text, activations)


def _check_can_choose(layout: Layout, blocks: Sequence[Block], sample: Any) -> None:
    """Raises `UserError` where there are too few blocks, or nothing to measure with."""
    stages = layout.stages
    if stages != "auto" and stages > len(blocks):
        raise UserError(
            f"layout: stages={stages}, and the model has {len(blocks)} blocks: "
            f"{', '.join(block.name for block in blocks)}. Take at most {len(blocks)} stages."
        )
    if sample is None and (stages == "auto" or layout.memory_gib is not None):
        what = "stages=auto" if stages == "auto" else f"memory_gib={layout.memory_gib:g}"
        raise UserError(
            f"layout: {what} needs measurements. Pass run.trainer(…, sample=x), the inputs of a "
            "batch."
        )


def _filled_in(layout: Layout, cut: Cut) -> Layout:
    replicas = cut.replicas if max(cut.replicas) > 1 else ()
    return dataclasses.replace(
        layout, stages=len(cut.stages), balance=cut.balance, replicas=replicas
    )


def _profiles(
    layout: Layout, blocks: Sequence[Block], world: Group, sample: Any, device: torch.device
) -> list[BlockProfile]:
    if sample is None:
        return parameters_only(blocks)
    message: Any = None
    if world.rank == 0:
        try:
            micro = cut_batch(sample, (), layout.microbatches, "mean")[0]
            with _on(device, blocks):
                message = [
                    list(profile) for profile in _measured(layout, blocks, micro.inputs, device)
                ]
        except UserError as error:  # or the others would wait for the numbers
            message = str(error)
    message = world.broadcast_json(message)
    if isinstance(message, str):
        raise UserError(message)
    return [BlockProfile(*profile) for profile in message]


def _measured(
    layout: Layout, blocks: Sequence[Block], inputs: Any, device: torch.device
) -> list[BlockProfile]:
    """What each block needs on one rank: of tiled stages, for one tile.

    A tile is measured as if it were the image: that is nearly what a shard computes, and the whole
    image may be too large for any rank. A model that takes images of one size only is measured
    whole, and its tiles are said to need their share.
    """

    def measure_for(shrunk: bool) -> list[BlockProfile]:
        def ready(tensor: torch.Tensor) -> torch.Tensor:
            # Copies, because a view would be taken for as large as what it looks at.
            return (_tile_of(layout, tensor) if shrunk else tensor).to(device, copy=True)

        return profile_blocks(blocks, pytree.tree_map_only(torch.Tensor, ready, inputs))

    if layout.shards == 1 or layout.in_turn or layout.tiled:
        return measure_for(shrunk=False)
    parts = math.prod(layout.tiles)
    try:
        profiles, rest = measure_for(shrunk=parts > 1), layout.channels
    except UserError:
        profiles, rest = measure_for(shrunk=False), layout.shards
    return [_share_of(profile, rest) for profile in profiles]


def _tile_of(layout: TileOptions, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() == len(layout.tiles) + 2:
        for dim, parts in enumerate(layout.tiles, start=2):
            tensor = tensor.narrow(dim, 0, -(-tensor.shape[dim] // parts))
    return tensor


def _share_of(profile: BlockProfile, parts: int) -> BlockProfile:
    return profile._replace(
        forward_seconds=profile.forward_seconds / parts,
        backward_seconds=profile.backward_seconds / parts,
        output_bytes=profile.output_bytes // parts,
        saved_bytes=profile.saved_bytes // parts,
        shared_bytes=profile.shared_bytes // parts,
    )


@contextmanager
def _on(device: torch.device, blocks: Sequence[Block]) -> Iterator[None]:
    """Inside, the blocks are where they will compute; afterwards where they were."""
    homes = [next(block.module.parameters(), torch.empty(0)).device for block in blocks]
    try:
        for block in blocks:
            block.module.to(device)
        yield
    finally:
        for block, home in zip(blocks, homes, strict=True):
            block.module.to(home)


def _network(world: Group) -> Network:
    """What two neighbours and two ranks of different hosts measure."""
    if world.size == 1:
        return Network(1e30)
    hosts = world.topology.hosts
    first = hosts[0].ranks
    across = link_between(
        world.transport, first[0], (hosts[1] if len(hosts) > 1 else hosts[0]).ranks[-1]
    )
    between = Network(1 / across.seconds_per_byte, across.seconds_per_message)
    if len(hosts) == 1 or len(first) == 1:
        return between
    near = link_between(world.transport, first[0], first[1])
    inside = Network(1 / near.seconds_per_byte, near.seconds_per_message)
    return dataclasses.replace(between, within=Component(len(first), inside))


def _held(layout: Layout) -> tuple[Any, Any]:
    """How many micro-batches and copies of its weights a rank holds, by its place."""
    if layout.stages == "auto" or layout.replicas:
        return None, None  # as one forward, one backward has it
    steady = facts(_steady(layout))
    ranks = len(steady.activations)

    def in_flight(ranks_from_here: int, own: int) -> int:
        return steady.activations[max(0, ranks - ranks_from_here)]

    def copies(ranks_from_here: int, own: int) -> int:
        versions = steady.versions[max(0, ranks - ranks_from_here)]
        return versions + _beside(layout, versions)

    # With several stages on a rank their places differ; that is checked when the cut is known.
    return (None, None) if ranks != layout.stages or layout.mirrored else (in_flight, copies)


def _steady(layout: Layout) -> Any:
    return layout.stream().unroll(4 * layout.ranks) if layout.streams else layout.pipeline()


def _memory(
    layout: Layout, profiles: Sequence[BlockProfile], cut: Cut
) -> tuple[list[float], list[float]]:
    """What each rank needs at its peak, as the schedule has it: for activations, and in all."""
    stages = [profiles[stage.first : stage.stop] for stage in cut.stages]
    saved = [
        sum(block.saved_bytes for block in blocks) - sum(block.shared_bytes for block in blocks[1:])
        for blocks in stages
    ]
    if layout.recompute:  # only what came in is kept
        saved = [0, *(blocks[-1].output_bytes for blocks in stages[:-1])]
    weights = [sum(block.parameter_bytes for block in blocks) for blocks in stages]
    # Read off the schedule that will run. What is promised here is what the interpreter will hold.
    pipeline = _steady(layout)
    nothing = [0.0] * len(stages)
    versions = facts(pipeline).versions
    return peak_bytes(pipeline, saved, nothing), [
        peak
        + _beside(layout, versions[rank]) * sum(weights[stage] for stage in pipeline.held(rank))
        for rank, peak in enumerate(peak_bytes(pipeline, saved, weights))
    ]


def _beside(layout: Layout, versions: int) -> int:
    """Copies of the weights beside their versions; a stash has copies of all versions too."""
    return _TRAINING_COPIES + (layout.streams and layout.stash and versions > 1)


def _require_room(layout: Layout, memory: Sequence[float], limit: float | None) -> None:
    if limit is None or max(memory) <= limit:
        return
    worst = max(range(len(memory)), key=memory.__getitem__)
    raise UserError(
        f"layout {layout}: rank {worst} would need {memory[worst] / _GIB:.3g} GiB, "
        f"{(memory[worst] - limit) / _GIB:.3g} GiB more than memory_gib={layout.memory_gib:g}. "
        "Take more stages, more micro-batches, or recompute."
    )

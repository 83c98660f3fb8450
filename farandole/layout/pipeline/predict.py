"""A forward pass through all stages without a backward: for evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from farandole.comm import Group
from farandole.comm.p2p.mail import Mail
from farandole.comm.p2p.payload import Description, describe
from farandole.errors import UserError
from farandole.layout.pipeline.micro import Micro
from farandole.layout.pipeline.stage import Stage
from farandole.layout.recording.replay import Unsent
from farandole.layout.tile_groups import TileGroups
from farandole.schedule.pipelines import Pipeline

_PREDICTION = 2  # the first number of a label; the interpreter's messages have 0 and 1


def predict(
    pipe: Group,
    mail: Mail,
    places: Pipeline,
    tile_groups: TileGroups,
    stages: Mapping[int, Stage],
    micros: Sequence[Micro],
) -> list[Any]:
    """The model's outputs for micro-batches, on every rank of the pipeline.

    In evaluation mode, micro-batch after micro-batch: no order of stages on ranks can lock up.
    """
    # Of every module: a script may have put some into evaluation for good, as frozen BatchNorms.
    modes = [(each, each.training) for stage in stages.values() for each in stage.module.modules()]
    for stage in stages.values():
        stage.module.eval()
    try:
        # All ranks go through micro-batches and stages in the same order, so a rank only waits for
        # what comes earlier in that order.
        with torch.no_grad():
            outputs = [
                _through(index, micro, pipe, mail, places, tile_groups, stages)
                for index, micro in enumerate(micros)
            ]
    finally:
        for module, training in modes:
            module.training = training
    last = places.stages - 1
    results = []
    for index, value in enumerate(outputs):
        source = tile_groups.members(places.home(last, index))[
            0
        ]  # on tiles, all of them have the same
        results.append(_broadcast(pipe, value, source, mail.device))
    return results


def _through(
    index: int,
    micro: Micro,
    pipe: Group,
    mail: Mail,
    places: Pipeline,
    tile_groups: TileGroups,
    stages: Mapping[int, Stage],
) -> Any:
    """This rank's stages of one micro-batch; returns the output on the last one's rank."""
    place, shard = tile_groups.place(pipe.rank), tile_groups.shard(pipe.rank)
    value, result = micro.inputs, None
    for number in sorted(stages):
        if places.home(number, index) != place:
            continue
        if number > 0:
            source = tile_groups.rank(places.home(number - 1, index), shard)
            assert source is not None
            mail.expect(source)
            value = mail.take(source, (_PREDICTION, number, index, 0))
        result = stages[number].predict(value, micro.rows)
        if number == places.stages - 1:
            _check_all_there(result)
        if number < places.stages - 1:
            to = tile_groups.rank(places.home(number + 1, index), shard)
            if to is not None:
                mail.post(to, (_PREDICTION, number + 1, index, 0), result)
            result = None
    return result


def _check_all_there(output: Any) -> None:
    """Raises `UserError` for a model's output of which a part was not recorded."""
    leaves = pytree.tree_leaves(output, is_leaf=lambda leaf: isinstance(leaf, Unsent))
    for leaf in leaves:
        if isinstance(leaf, Unsent):
            raise UserError(
                f"the model's output holds a {leaf.kind}, which cannot travel between workers. "
                "Let the model return tensors, numbers, and nests of them alone; of Hugging Face's "
                "models, set model.config.use_cache = False."
            )


def _broadcast(pipe: Group, value: Any, source: int, device: torch.device) -> Any:
    """What rank `source` has, on every rank."""
    described, tensors = describe(value) if pipe.rank == source else (None, [])
    text = described.text().decode() if described is not None else None
    description = Description.read(pipe.broadcast_json(text, source).encode())
    if pipe.rank != source:
        tensors = [
            torch.empty(slot.shape, dtype=slot.dtype, device=device) for slot in description.slots
        ]
    return description.fill([pipe.broadcast(tensor.contiguous(), source) for tensor in tensors])


class RowlessOutputError(Exception):
    """A part of the output, such as an auxiliary loss, is of a whole batch."""


def joined(outputs: Sequence[Any]) -> Any:
    """Micro-batches' outputs as one batch's: tensors are joined by rows.

    Raises `RowlessOutputError` where one has none.
    """
    if len(outputs) == 1:
        return outputs[0]
    leaves = [pytree.tree_leaves(output) for output in outputs]
    spec = pytree.tree_structure(outputs[0])
    whole = []
    for parts in zip(*leaves, strict=True):
        if isinstance(parts[0], torch.Tensor):
            if parts[0].dim() == 0:
                raise RowlessOutputError(
                    "the model's output holds a number of the whole batch, which cannot be put "
                    "together from parts of it. Let the model return it for each sample."
                )
            whole.append(torch.cat(parts))
        else:
            whole.append(parts[0])
    return pytree.tree_unflatten(whole, spec)

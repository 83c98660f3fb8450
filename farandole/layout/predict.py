"""A forward pass through all stages without a backward: for evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from farandole.comm import Group
from farandole.comm.mail import Mail
from farandole.comm.parcel import Description, describe
from farandole.errors import UserError
from farandole.layout.stage import Stage
from farandole.schedule.pipelines import Pipeline

_PREDICTION = 2  # the first number of a label; the interpreter's messages have 0 and 1


def predict(
    pipe: Group,
    mail: Mail,
    places: Pipeline,
    stages: Mapping[int, Stage],
    micros: Sequence[Any],
) -> Any:
    """The model's output for micro-batches, put together again, on every rank of the pipeline.

    In evaluation mode, micro-batch after micro-batch: no order of stages on ranks can lock up.
    """
    modes = {stage: stage.part.training for stage in stages.values()}
    for stage in modes:
        stage.part.eval()
    try:
        with torch.no_grad():
            outputs = [
                _through(index, value, pipe, mail, places, stages)
                for index, value in enumerate(micros)
            ]
    finally:
        for stage, training in modes.items():
            stage.part.train(training)
    last = places.stages - 1
    return _joined(
        [
            _told(pipe, value, places.home(last, index), mail.device)
            for index, value in enumerate(outputs)
        ]
    )


def _through(
    index: int,
    value: Any,
    pipe: Group,
    mail: Mail,
    places: Pipeline,
    stages: Mapping[int, Stage],
) -> Any:
    """This rank's stages of one micro-batch; returns the output on the last one's rank."""
    result = None
    for number in sorted(stages):
        if places.home(number, index) != pipe.rank:
            continue
        if number > 0:
            source = places.home(number - 1, index)
            mail.expect(source)
            value = mail.take(source, (_PREDICTION, number, index, 0))
        result = stages[number].predict(value)
        if number < places.stages - 1:
            mail.post(places.home(number + 1, index), (_PREDICTION, number + 1, index, 0), result)
            result = None
    return result


def _told(pipe: Group, value: Any, source: int, device: torch.device) -> Any:
    """What rank `source` has, on every rank."""
    described, tensors = describe(value) if pipe.rank == source else (None, [])
    text = described.text().decode() if described is not None else None
    description = Description.read(pipe.broadcast_json(text, source).encode())
    if pipe.rank != source:
        tensors = [
            torch.empty(slot.shape, dtype=slot.dtype, device=device) for slot in description.slots
        ]
    return description.fill([pipe.broadcast(tensor.contiguous(), source) for tensor in tensors])


def _joined(outputs: Sequence[Any]) -> Any:
    """Micro-batches' outputs as one batch's: tensors are joined by rows."""
    if len(outputs) == 1:
        return outputs[0]
    leaves = [pytree.tree_leaves(output) for output in outputs]
    spec = pytree.tree_structure(outputs[0])
    joined = []
    for parts in zip(*leaves, strict=True):
        if isinstance(parts[0], torch.Tensor):
            if parts[0].dim() == 0:
                raise UserError("an output without rows cannot be put together from micro-batches.")
            joined.append(torch.cat(parts))
        else:
            joined.append(parts[0])
    return pytree.tree_unflatten(joined, spec)

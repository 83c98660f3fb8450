"""Before a model is cut: what cannot go together is refused, and all ranks agree on its blocks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from farandole.comm import Group
from farandole.errors import UserError
from farandole.layout import Layout
from farandole.layout.arguments import Arguments
from farandole.layout.partition.blocks import Block, Sample, blocks_of
from farandole.layout.pipeline.micro import cut_batch
from farandole.sync import Strategy
from farandole.train.engines.recipe import Recipe
from farandole.train.session import Session
from farandole.train.settings import check_goes_with, check_workers, check_writable


def agreed_blocks(session: Session, find: Callable[[], list[Block]]) -> list[Block]:
    """*Together.* The blocks, if they are the same on all ranks; what stops one stops all."""
    blocks: list[Block] = []
    reason = ""
    try:
        blocks = find()
    except UserError as error:
        reason = str(error)
    told = session.group.gather_json([reason, [block.name for block in blocks]])
    for rank, (reason, names) in enumerate(told):
        if reason:
            raise UserError(reason)
        if names != told[0][1]:
            raise UserError(
                f"rank {rank} cuts the model into {len(names)} blocks, {', '.join(names)}, and "
                f"rank 0 into {len(told[0][1])}, {', '.join(told[0][1])}. Give all ranks the same "
                "model and the same sample."
            )
    return blocks


def find_blocks(
    model: nn.Module,
    layout: Layout,
    recipe: Recipe,
    given: Arguments | None,
    device: torch.device,
) -> list[Block]:
    """Of a model that stays in one stage, one block if there is no way to find more."""
    sample = None
    if given is not None:
        micro = cut_batch(given, (), layout.microbatches, "mean")[0]
        sample = Sample(micro.inputs, device, recipe.precision)
    try:
        return blocks_of(model, layout.cuts, sample)
    except UserError:
        if layout.stages != 1 or layout.cuts:
            raise
        return [Block("the model", model)]


def check_combination(session: Session, layout: Layout, strategy: Strategy, recipe: Recipe) -> None:
    if len(session.models):
        raise UserError("a run with a layout has one model, and this one has another already.")
    if session.rank == 0:
        check_writable(session.folder)
    check_workers(layout, session.size)
    check_goes_with(layout, strategy)
    if recipe.precision is torch.float16 and layout.streams:
        raise UserError(
            f"precision=torch.float16 skips an update on all stages when one overflows, and "
            f"{layout.schedule} updates stage by stage. Take torch.bfloat16, or schedule=1f1b."
        )
    if recipe.loss is None and layout.shards > 1:
        raise UserError(
            f"loss=None: the model computes its own loss, and layout {layout} cuts its images: of "
            "a tile it would be another. Let the model return its output, and pass a loss function."
        )
    if recipe.clip is not None and layout.streams:
        raise UserError(
            f"clip={recipe.clip:g} needs the gradients of all stages at once, and "
            f"{layout.schedule} updates stage by stage. Leave it out, or take schedule=1f1b."
        )


def can_outlive(strategy: Strategy, layout: Layout, recipe: Recipe, replicas: Group) -> bool:
    """Whether the state before a step is still there, in a survivor of each part of the model, when
    a rank is lost within it.

    Not with one replica; nor where ranks change more than their gradients in a step before all of
    them agree: batches under way in a stream, the scale of float16, what a codec keeps back.
    """
    return (
        replicas.size > 1
        and not layout.streams
        and recipe.precision is not torch.float16
        and strategy.why_not_elastic is None
    )

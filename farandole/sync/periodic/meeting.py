"""The status that ranks exchange before they average their models.

Ranks do not always come to a meeting after the same number of steps: a gradient scaler skips a step
on one rank and not on another. So no rank assumes where the others are. A rank whose epoch is over
says so, and keeps meeting the others until all say so. Every meeting therefore has all ranks.

Nothing is averaged before all ranks have said that their models are finite.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from farandole.comm import Group
from farandole.sync.common.flat import moments_of
from farandole.sync.common.guard import KEPT_BACK, Culprit, GradientGuard, diverged
from farandole.sync.periodic.losses import Losses


class RankStatus(NamedTuple):
    """One rank's status, as it travels: numbers only."""

    ending: float  # 1: the epoch is over here
    pending: float  # steps since the ranks were last in step
    due: float  # 1: the period is over here
    steps: float  # since the run began
    weight: float  # of the samples since the last meeting
    sound: float  # 0: a parameter is not finite
    loss_sum: float  # of the batches reported since the last meeting
    loss_count: float
    logged: float  # the last loss that the script logged; NaN if there is none
    logs: float
    seconds: float  # on this rank's clock
    rate: float  # the learning rate here
    moments: float  # a checksum of the names of what the optimizer remembers; 0: nothing


def status_of(
    losses: Losses,
    optimizer: Optimizer,
    *,
    pending: int,
    steps: int,
    sound: bool,
    ending: bool = False,
    due: bool = False,
    weight: float = 1.0,
    seconds: float = 0.0,
) -> RankStatus:
    """This rank's status. The losses in it count as reported."""
    loss_sum, loss_count = losses.take()
    return RankStatus(
        ending=ending,
        pending=pending,
        due=due,
        steps=steps,
        weight=weight,
        sound=sound,
        loss_sum=loss_sum,
        loss_count=loss_count,
        logged=math.nan if losses.logged is None else losses.logged,
        logs=losses.logs,
        seconds=seconds,
        rate=float(optimizer.param_groups[0]["lr"]),
        moments=zlib.crc32(" ".join(moments_of(optimizer)).encode()),
    )


def ask_everyone(group: Group, status: RankStatus) -> list[RankStatus]:
    """Everyone's status, in rank order. All ranks call it."""
    # As float64, not as JSON: one small tensor through the same transport as the models. Counts up
    # to 2**53 and checksums of 32 bits are exact in it.
    mine = torch.tensor(status, dtype=torch.float64)
    return [RankStatus(*row.tolist()) for row in group.all_gather(mine)]


def require_sound(
    group: Group, guard: GradientGuard, said: Sequence[RankStatus], culprit: Culprit | None
) -> None:
    """Raises `DivergedError` on all ranks if anything on any of them is not finite.

    `culprit` is what is not finite on this one.
    """
    if not guard.is_on:
        return
    for rank, status in zip(guard.ranks, said, strict=True):
        if not math.isfinite(status.loss_sum):
            raise diverged(rank, int(status.steps), "its loss")
    if not all(status.sound for status in said):
        raise_together(group, culprit)


def raise_together(group: Group, culprit: Culprit | None) -> None:
    """*Together.* Raises the culprit of the first rank that has one, on all ranks."""
    for found in group.gather_json(culprit):
        if found is not None:
            raise Culprit(*found).error


def bad_parameter(guard: GradientGuard, step: int, name: str | None) -> Culprit | None:
    """A parameter of this rank, by its name; None: there is none."""
    if name is None:
        return None
    return Culprit(guard.rank, step, f"its parameter {guard.name_of(name)!r}", KEPT_BACK)


def loss_of(said: Sequence[RankStatus]) -> float | None:
    """The mean loss of all ranks since the last meeting; else what rank 0 logged; else None."""
    count = sum(status.loss_count for status in said)
    if count:
        return sum(status.loss_sum for status in said) / count
    return None if math.isnan(said[0].logged) else said[0].logged

"""Schedules made of schedules: the same rounds on other ranks, and several groups at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

import numpy as np
import numpy.typing as npt

from farandole.schedule.rounds import Round, Schedule


def placed(
    schedule: Schedule, ranks: Sequence[int], bounds: npt.NDArray[np.int64]
) -> tuple[Round, ...]:
    """The rounds of `schedule` with rank i played by `ranks[i]`.

    Its chunk i becomes the chunks `bounds[i]` … `bounds[i + 1] - 1`.
    """
    players = np.asarray(ranks, dtype=np.int32)
    edges = bounds.astype(np.int32)
    return tuple(
        Round(players[turn.src], players[turn.dst], edges[turn.first], edges[turn.stop], turn.adds)
        for turn in schedule.rounds
    )


def side_by_side(groups: Iterable[tuple[Round, ...]]) -> tuple[Round, ...]:
    """Groups that do not touch each other's chunks, each taking its rounds from the first on."""
    return tuple(
        Round.merged([turn for turn in turns if turn is not None]) for turns in zip_longest(*groups)
    )

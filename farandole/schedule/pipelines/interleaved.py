"""Interleaved 1F1B: several stages on each rank, so a micro-batch passes every rank several times.

    2 ranks, 4 stages, 2 micro-batches; F0.2 is the forward of micro-batch 0 on stage 2

    rank 0   F0.0 F1.0 F0.2 F1.2      B0.2      B1.2 B0.0 B1.0
    rank 1        F0.1 F1.1 F0.3 B0.3 F1.3 B1.3 B0.1 B1.1

A stage is a small part of the model, so the pipeline fills and empties in small steps: with v
stages on each rank the bubble is v times shorter. The price is v times as many messages.
"""

from __future__ import annotations

from collections.abc import Iterator

from farandole.errors import UserError
from farandole.schedule.pieces import piece
from farandole.schedule.pipelines.actions import Action, Pipeline, update


def interleaved(stages: int, micros: int, chunks: int) -> Pipeline:
    """Stage s on rank s modulo the number of ranks; `chunks` stages on each."""
    if chunks < 1 or stages % chunks:
        raise UserError(
            f"interleaved: {chunks} stages on each rank do not divide {stages} stages; give "
            f"a multiple of {max(1, chunks)} stages."
        )
    ranks = stages // chunks
    homes = tuple((stage % ranks,) for stage in range(stages))
    actions = tuple((*_order(rank, ranks, chunks, micros), update(1)) for rank in range(ranks))
    return Pipeline("interleaved", micros, (homes,), actions)


def _order(rank: int, ranks: int, chunks: int, micros: int) -> Iterator[Action]:
    """1F1B over pairs (stage, micro-batch) instead of micro-batches."""
    groups = _groups(ranks, micros)
    down = [(chunk, micro) for group in groups for chunk in range(chunks) for micro in group]
    # Backwards pass the stages of a rank in the opposite order, with the same groups. So the
    # gradient of a group's first micro-batch is back when this rank turns to it.
    up = [(chunks - 1 - chunk, micro) for chunk, micro in down]
    # A group must come round to this rank's last stage before its first backward; then, for each
    # rank after this one, a forward more for the way there and one for the way back.
    ahead = (chunks - 1) * max(map(len, groups)) + 2 * (ranks - 1 - rank)
    for index, (chunk, micro) in enumerate(down):
        yield Action("F", chunk * ranks + rank, micro)
        if index >= ahead:
            chunk, micro = up[index - ahead]
            yield Action("B", chunk * ranks + rank, micro)
    for chunk, micro in up[max(0, len(up) - ahead) :]:
        yield Action("B", chunk * ranks + rank, micro)


def _groups(ranks: int, micros: int) -> list[range]:
    """Micro-batches that pass a stage together before the rank turns to its next stage.

    As many as ranks, so that the first is back when the last has gone. Where they do not divide,
    some groups have more; fewer would wait for the way round.
    """
    count = max(1, micros // ranks)
    return [piece(index, count, micros) for index in range(count)]

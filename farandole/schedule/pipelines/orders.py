"""The three simple schemes: in which order one rank goes through its micro-batches.

Each is a generator of turns, `("F", 2)`, for a rank that holds one stage and computes `micros`.
`depth` is the number of forwards that it is ahead of its backwards; the last stage needs none.
GEMS takes the same generators, for one direction after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from farandole.schedule.pipelines.actions import Kind

Turn = tuple[Kind, int]
"""What to do, and for which micro-batch."""


def layer(micros: Sequence[int], depth: int) -> Iterator[Turn]:
    """One micro-batch at a time: all ranks but one wait.

    ```
    rank 0   F0             B0 F1             B1
    rank 1      F0       B0       F1       B1
    rank 2         F0 B0             F1 B1
    ```
    """
    for micro in micros:
        yield "F", micro
        yield "B", micro


def gpipe(micros: Sequence[int], depth: int) -> Iterator[Turn]:
    """All forwards, then all backwards: simple, and every activation is held at once.

    ```
    rank 0   F0 F1 F2 F3             B0 B1 B2 B3
    rank 1      F0 F1 F2 F3       B0 B1 B2 B3
    rank 2         F0 F1 F2 F3 B0 B1 B2 B3
    ```
    """
    for micro in micros:
        yield "F", micro
    for micro in micros:
        yield "B", micro


def one_forward_one_backward(micros: Sequence[int], depth: int) -> Iterator[Turn]:
    """A backward as soon as there is one: as fast as GPipe, and `depth + 1` activations.

    ```
    rank 0   F0 F1 F2       B0 F3 B1    B2    B3       depth 2
    rank 1      F0 F1    B0 F2 B1 F3 B2    B3          depth 1
    rank 2         F0 B0 F1 B1 F2 B2 F3 B3             depth 0
    ```
    """
    for index, micro in enumerate(micros):
        yield "F", micro
        if index >= depth:
            yield "B", micros[index - depth]
    for micro in micros[max(0, len(micros) - depth) :]:
        yield "B", micro

"""Which layouts a model of the zoo is held under, by the column of the table."""

from __future__ import annotations

from tests.zoo.registry import ZOO, Case

TILED = {  # by the axes of an image
    1: {"two tiles": "tiles=2"},
    2: {"two tiles": "tiles=2x1", "four tiles": "tiles=2x2"},
    3: {"two tiles": "tiles=1x2x1", "four tiles": "tiles=1x2x2"},
}
STAGED = {
    "two stages": "stages=2,microbatches=2",
    "two stages, with a sample": "stages=2,microbatches=2",
    "GEMS": "stages=2,microbatches=2,schedule=gems",
    "zero-bubble": "stages=2,microbatches=2,schedule=zero-bubble",
    "recomputed": "stages=2,recompute",
}
COLUMNS = (
    "two tiles",
    "four tiles",
    "channels",
    *STAGED,
    "tiles and stages",
)
ALWAYS = ("two tiles", "two stages")
USUAL = ("convolutional classifiers", "segmentation and detection")
WITH_SAMPLE = "two stages, with a sample"


def layouts_of(case: Case) -> dict[str, str]:
    """The columns of this model, each with its layout: tiles and stages for all, and of the other
    columns one in turn where only convolutions are, else two."""
    tiled = TILED.get(case.axes, {})
    found = {**tiled, **STAGED}
    if tiled:
        found["channels"] = "channels=2"
        found["tiles and stages"] = f"{tiled['two tiles']},stages=2,microbatches=2"
    others = [column for column in COLUMNS if column in found and column not in ALWAYS]
    turn = [name for name, other in ZOO.items() if other.family == case.family].index(case.name)
    count = 1 if case.family in USUAL else 2
    chosen = {*ALWAYS, *(others[(count * turn + step) % len(others)] for step in range(count))}
    return {column: found[column] for column in COLUMNS if column in found and column in chosen}

"""What a scaling study measures: models, strategies and numbers of workers, each with each.

weak      the batch of each worker stays the same: n workers do n times the work of a step
strong    the batch of all workers together stays the same: each does an n-th of it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from farandole.errors import UserError

Scaling = Literal["weak", "strong"]
BOTH: tuple[Scaling, ...] = get_args(Scaling)


@dataclass(frozen=True)
class Curve:
    """One line of the picture."""

    model: str
    sync: str
    scaling: Scaling

    def label(self, among: Sequence[Curve]) -> str:
        """What tells it apart from the others; its model at least."""
        words = [self.model]
        if len({curve.sync for curve in among}) > 1:
            words.append(self.sync)
        if len({curve.scaling for curve in among}) > 1:
            words.append(self.scaling)
        return ", ".join(words)


@dataclass(frozen=True)
class Cell:
    """One measurement: a curve at one number of workers. `batch_size` is each worker's."""

    curve: Curve
    workers: int
    batch_size: int


def read_counts(text: str) -> tuple[int, ...]:
    """`1,2,4,8`, in rising order. Raises `UserError` for what is no such list."""
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        raise UserError(
            f"-n {text}: give a number of workers, or several, such as -n 1,2,4,8."
        ) from None
    if min(counts) < 1:
        raise UserError(f"-n {text}: a benchmark needs at least 1 worker.")
    twice = next((count for count in counts if counts.count(count) > 1), None)
    if twice is not None:
        raise UserError(f"-n {text}: {twice} is given twice.")
    return tuple(sorted(counts))


def plan_cells(
    models: Sequence[str],
    syncs: Sequence[str],
    scalings: Sequence[Scaling],
    counts: Sequence[int],
    batch_size: int,
) -> list[Cell]:
    """Curve by curve. Raises `UserError` where a batch cannot be divided among the workers.

    The batch of strong scaling is that of the smallest number of workers.
    """
    whole = batch_size * counts[0]
    cells = []
    for model in dict.fromkeys(models):
        for sync in dict.fromkeys(syncs):
            for scaling in scalings:
                for count in counts:
                    own = batch_size
                    if scaling == "strong":
                        own, rest = divmod(whole, count)
                        if rest or not own:
                            raise UserError(
                                f"--scaling strong: {whole} images cannot be divided among "
                                f"{count} workers. Give a --batch-size that can, such as "
                                f"{-(-whole // count) * count // counts[0]}."
                            )
                    cells.append(Cell(Curve(model, sync, scaling), count, own))
    return cells

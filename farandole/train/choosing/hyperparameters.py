"""Settings of optimizers that a checkpoint of another member of a population must not change.

A member that goes on with the weights of a better one has made its optimizer with choices of its
own: another rate, say. A checkpoint has the settings of the member that has saved it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch.optim import Optimizer

_PLAIN = (bool, int, float, str, tuple, type(None))


@contextmanager
def kept_hyperparameters(optimizers: Iterable[Optimizer | None]) -> Iterator[None]:
    """What each group of parameters was made with inside holds again at the end."""
    found = [optimizer for optimizer in optimizers if optimizer is not None]
    before = [
        [{k: v for k, v in group.items() if isinstance(v, _PLAIN)} for group in each.param_groups]
        for each in found
    ]
    yield
    for optimizer, groups in zip(found, before, strict=True):
        for group, kept in zip(optimizer.param_groups, groups, strict=True):
            group.update(kept)

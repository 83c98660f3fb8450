"""Whether a script has learning-rate schedulers, whose state only the script can save."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from torch.optim import Optimizer

NOTE: Final = (
    "note: the optimizer has a learning-rate scheduler, and automatic checkpoints do not contain "
    'its state. Write run.checkpoint_state(lambda: {"schedule": schedule.state_dict()}), and '
    "restore it from what run.load() returns."
)


def has_scheduler(optimizers: Iterable[Optimizer | None]) -> bool:
    """A scheduler of torch's marks the `step` of its optimizer, to notice calls in wrong order."""
    steps = (getattr(optimizer, "step", None) for optimizer in optimizers)
    return any(hasattr(step, "_wrapped_by_lr_sched") for step in steps)

"""What a trial of `farandole run --per-gpu auto` tells its launcher: how fast it trains.

Rank 0 writes it when its warm-up is over, and again when it has measured enough.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from farandole.files import write_whole

WARM_UP_STEPS = 10


@dataclass(frozen=True)
class ThroughputRecord:
    """Steps, samples of all ranks, and seconds after the warm-up."""

    warm_up_steps: int = 0
    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    is_enough: bool = False  # the trial need not go on

    @property
    def samples_per_second(self) -> float | None:
        return self.samples / self.seconds if self.steps and self.seconds > 0 else None


def write_trial(path: Path, record: ThroughputRecord) -> None:
    """Raises `FarandoleError` where it cannot be written."""
    write_whole(path, json.dumps(asdict(record)).encode())


def read_trial(path: Path) -> ThroughputRecord | None:
    """None where there is none so far."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return ThroughputRecord(**json.loads(path.read_text()))
    return None

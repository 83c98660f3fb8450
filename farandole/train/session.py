"""What the parts of a run share: who takes part, what is trained, and how far it has come.

`Run` is what a script holds; loaders, engines, metrics and checkpoints know the session instead, so
that none of them reaches into the run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.optim import Optimizer

from farandole.comm import Group
from farandole.data import Shares
from farandole.layout import Layout
from farandole.sync import Strategy
from farandole.topology import Topology
from farandole.train.checkpoint.survivors.base import Survivors
from farandole.train.choosing.choice import Value
from farandole.train.counters import TrainingProgress
from farandole.train.distributed_models import DistributedModels
from farandole.train.progress import EpochProgress
from farandole.train.settings import Settings
from farandole.train.spans import Watch
from farandole.worker.run_reporter import RunReporter


@dataclass
class Session:
    """One rank's. The strategy, the layout and the replicas are those of the model given last."""

    group: Group
    topology: Topology
    device: torch.device
    settings: Settings
    folder: Path  # of this run
    seed: int
    strategy: Strategy
    models: DistributedModels
    progress: TrainingProgress
    replicas: Group  # those who share the data: one rank of every replica, this one's
    bar: EpochProgress | None  # on rank 0
    watch: Watch | None  # where somebody wants a trace
    layout: Layout | None = None  # None: the whole model on every rank
    cut: Shares | None = None  # that the last training batch came from, if it is known
    optimizers: list[Optimizer] = field(default_factory=list)  # that the script itself steps
    most_workers: int | None = None  # of an elastic job; None: it is none
    is_successor: bool = False  # another worker was rank 0 before this one
    reporter: RunReporter | None = None  # on rank 0, where the launcher may start the job again
    survivors: Survivors | None = None  # where all start again when one is lost
    choices: dict[str, Value] = field(default_factory=dict)  # by `run.choose`
    batch_weight: float = 1.0  # of this rank's batch that is under way, in an average over ranks
    averages_elsewhere: bool = False  # a front-end keeps models in step that are not among `models`
    reads_elsewhere: bool = False  # a front-end deals out the samples
    joined_later: bool = False  # the others had begun when this one came, in an elastic job

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def keeps_in_step(self) -> bool:
        """Whether anything keeps the ranks' models alike."""
        return self.averages_elsewhere or len(self.models) > 0

    def take_rank(self) -> None:
        """Ranks have changed, in an elastic job: what only rank 0 does, its successor does now."""
        self.topology = self.group.topology
        if self.rank == 0 and self.bar is None:
            self.bar = EpochProgress()
            self.is_successor = True
        elif self.rank != 0:
            self.bar = None

    def print(self, *values: object) -> None:
        """Prints on rank 0, above the progress bar if there is one."""
        if self.bar is not None:
            self.bar.print(" ".join(map(str, values)))

    def counters(self) -> dict[str, float]:
        """What every line of the metrics begins with."""
        return {
            "time": self.progress.seconds,
            "samples": self.progress.samples,
            "steps": self.progress.steps,
            "waited_seconds": self.group.meter.waited_seconds,
            "bytes_sent": self.group.meter.bytes_sent,
        }

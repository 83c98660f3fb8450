"""The properties of a `Run`: who this rank is, and how far the training has come."""

from __future__ import annotations

from pathlib import Path

import torch

from farandole.comm import Group
from farandole.topology import Topology
from farandole.train.session import Session
from farandole.train.settings import Settings


class RunInfo:
    """What a script can ask a `Run`."""

    _session: Session

    @property
    def group(self) -> Group:
        return self._session.group

    @property
    def topology(self) -> Topology:
        return self._session.topology

    @property
    def device(self) -> torch.device:
        return self._session.device

    @property
    def settings(self) -> Settings:
        return self._session.settings

    @property
    def folder(self) -> Path:
        """Where this run's metrics and checkpoints go."""
        return self._session.folder

    @property
    def seed(self) -> int:
        return self._session.seed

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def local_rank(self) -> int:
        return self.topology.local_rank(self.rank)

    @property
    def local_size(self) -> int:
        return self.topology.local_size(self.rank)

    @property
    def host(self) -> str:
        return self.topology.host(self.rank).name

    @property
    def samples(self) -> int:
        """Trained on so far, by all ranks together."""
        return self._session.progress.samples

    @property
    def steps(self) -> int:
        return self._session.progress.steps

    @property
    def epoch(self) -> int:
        return self._session.progress.epoch

    @property
    def resumed(self) -> bool:
        return self._session.progress.resumed

    @property
    def seconds(self) -> float:
        """Since the run began; a resumed run goes on where the saved one stopped."""
        return self._session.progress.seconds

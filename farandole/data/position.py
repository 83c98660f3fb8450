"""How far the reading of a dataset has come. Loaders that follow one another on it share this.

A position counts samples of the epoch's order, over all ranks. The order depends on the seed and
the epoch only, and for data that are read in chunks on who read them when the epoch began, which is
kept. So a position means the same on any number of ranks and with any batch size: what comes before
it is used, what comes after it is not. Samples that a lost worker had read in vain lie before it,
and are to be read again (`dealing`): they are listed beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from farandole.data.chunks.lanes import Readers


@dataclass
class Position:
    """The epoch, and how many of its samples all ranks together have used."""

    epoch: int = 0
    done_samples: int = 0
    resume_at: int = 0  # the samples of this epoch that a run which is resumed has used already
    returned: list[int] = field(default_factory=list)  # places before `done_samples`, not used
    drawn: list[int] = field(default_factory=list)  # this epoch's, by the user's own sampler
    speeds: list[float] = field(default_factory=list)  # of the ranks, as all agreed on them
    readers: Readers | None = None  # of this epoch when it began, if its order depends on them
    first_samples: dict[str, str] = field(default_factory=dict)  # of a stream: their digests
    read_whole: bool = False  # the last epoch that was begun was read to its end
    reader: object | None = None  # the loader whose pass is under way

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"epoch": self.epoch, "done_samples": self.done_samples}
        if self.drawn:
            state["drawn"] = torch.tensor(self.drawn)
        if self.returned:
            state["returned"] = torch.tensor(self.returned)
        if self.speeds:
            state["speeds"] = torch.tensor(self.speeds, dtype=torch.float64)
        if self.readers is not None:
            state["readers"] = [*self.readers[:-1], list(self.readers.quotas)]
        if self.first_samples:
            state["first_samples"] = dict(self.first_samples)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch = state["epoch"]
        # Two numbers: `resume_at` is used up when the pass begins, `done_samples` then counts on. A
        # run that is saved again before it reads anything must find the same position.
        self.done_samples = self.resume_at = state["done_samples"]
        self.drawn = state["drawn"].tolist() if "drawn" in state else []
        self.returned = state["returned"].tolist() if "returned" in state else []
        self.speeds = state["speeds"].tolist() if "speeds" in state else []
        if "readers" in state:
            *others, quotas = state["readers"]
            self.readers = Readers(*others)._replace(quotas=tuple(quotas))
        else:
            self.readers = None
        self.first_samples = dict(state.get("first_samples", {}))

    def use(self, samples: int) -> None:
        """The next samples are handed out: those that were returned come first."""
        early = min(samples, len(self.returned))
        del self.returned[:early]
        self.done_samples += samples - early

    def end_epoch(self, *, whole: bool) -> None:
        self.epoch += 1
        self.done_samples = 0
        self.drawn, self.returned, self.readers, self.first_samples = [], [], None, {}
        self.read_whole = whole
        self.reader = None

"""A strategy around the stages of a pipeline: what is under way in the pipeline ends first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from farandole.layout.pipeline.pipelined import Pipelined
from farandole.sync import Synchronizer


class PipelinedSynchronizer(Synchronizer):
    """Hands everything on to the strategy's own synchronizer of this rank's stages.

    In a stream (PipeDream, 2BW) several batches are under way, and an update is of one that began
    several steps ago: what a step began with is kept until then.
    """

    def __init__(self, inner: Synchronizer, pipelined: Pipelined) -> None:
        super().__init__(inner.model, guard=inner.guard)
        self.in_step_after_pass = inner.in_step_after_pass
        self._inner = inner
        self._pipelined = pipelined
        self.notes = inner.notes
        self._begun: dict[int, tuple[float, float | None, float]] = {}  # by turn of a stream
        pipelined.runner.before_update = self._begin_late

    def check_finite(self, on: bool) -> None:
        self._inner.check_finite(on)

    def share_samples(self, readers: int) -> None:
        self._inner.share_samples(readers)

    def begin_step(self, weight: float, progress: float | None, samples: float) -> None:
        if self._pipelined.layout.streams:
            self._begun[self._pipelined.runner.turns] = weight, progress, samples
        else:
            self._inner.begin_step(weight, progress, samples)

    def _begin_late(self, turns: Sequence[int]) -> None:
        """In a stream, the batch that an update is of began several steps ago."""
        begun = [self._begun.pop(turn) for turn in turns if turn in self._begun]
        if begun:
            weight = sum(weight for weight, _, _ in begun) / len(begun)
            samples = sum(samples for _, _, samples in begun)
            self._inner.begin_step(weight, begun[-1][1], samples)

    def no_sync(self) -> AbstractContextManager[None]:
        return self._inner.no_sync()

    def observe_loss(self, loss: torch.Tensor | float) -> None:
        self._inner.observe_loss(loss)

    def hear(self, loss: float) -> None:
        self._inner.hear(loss)

    def begin_pass(self) -> None:
        self._inner.begin_pass()

    def end_pass(self) -> None:
        self._pipelined.runner.drain()
        self._begun.clear()  # of batches that other ranks of the stage have computed
        self._inner.end_pass()

    def whole_model(self) -> dict[str, Any]:
        return self._inner.whole_model()

    def close(self) -> None:
        self._inner.close()
        self._pipelined.close()

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self._inner.state_dict(), "pipeline": self._pipelined.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._inner.load_state_dict(state["inner"])
        self._pipelined.load_state_dict(state["pipeline"])

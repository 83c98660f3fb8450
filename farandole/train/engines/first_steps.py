"""What the first steps of a layout show: how much memory its activations take, and how long the
layers need, by which halos are then planned."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from farandole.layout.partition.choose import Choice
from farandole.layout.pipeline.memory import ActivationMeter, describe_memory
from farandole.layout.pipeline.pipelined import Pipelined
from farandole.layout.tiles.core.tiling import Tiling
from farandole.layout.tiles.halo.planning import plan_halos
from farandole.train.session import Session


class FirstSteps:
    """Measures the first steps, reports once, and then costs nothing."""

    def __init__(
        self, session: Session, pipelined: Pipelined, tilings: Mapping[int, Tiling], choice: Choice
    ) -> None:
        layout = choice.layout
        self._session = session
        self._pipelined = pipelined
        self._tilings = tilings
        self._predicted = choice.activation_bytes and [
            peak
            for peak, members in zip(choice.activation_bytes, layout.group_sizes, strict=True)
            for _ in range(members)
        ]
        self._meter: ActivationMeter | None = pipelined.measure()
        # The first step may be unlike all others; a stream must have filled first.
        self._left = 2 * layout.ranks + 2 if layout.streams else 2

    def count(self) -> None:
        """A step has been taken."""
        self._left -= 1

    def report(self) -> None:
        """Prints, once, what the activations of every rank took, and were said to take.

        The ranks meet for it. In a stream one may wait for what another does in its next step, so
        they meet when nothing is under way.
        """
        if self._meter is None or self._left > 0:
            return
        self._pipelined.stop_measuring()
        if self._pipelined.runner.turns:
            return
        meter, self._meter = self._meter, None
        pipe, device = self._pipelined.pipe, self._session.device
        on_device = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        told = pipe.gather_json([meter.peak_bytes, sorted(self._pipelined.stages), on_device])
        measured, stages, peaks = zip(*told, strict=True)
        self._session.print(describe_memory(measured, self._predicted, stages, peaks))
        if self._pipelined.layout.shards > 1:
            self._plan_halos()

    def _plan_halos(self) -> None:
        """The layers and how long they take are known by now."""
        pipelined = self._pipelined
        lines = plan_halos(self._tilings, pipelined.layout.halo, pipelined.tile_group)
        told = [line for lines in pipelined.pipe.gather_json(lines) for line in lines]
        first = {line.split(":")[0]: line for line in reversed(told)}  # the shards say the same
        self._session.print("\n".join(first[stage] for stage in sorted(first)))

"""A replica of the model at work on the ranks of a pipeline: training, prediction, measuring.

How a schedule is carried out is in `schedule_runner`. Here is what a caller sees of it: batches go
in, and losses and predictions of the whole replica come out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from farandole.comm import Group
from farandole.comm.p2p.mail import Mail
from farandole.errors import UserError
from farandole.layout.arguments import arguments_of
from farandole.layout.layout import Layout
from farandole.layout.objective import Objective
from farandole.layout.pipeline.masked_means import MaskedMeans, compare
from farandole.layout.pipeline.memory import ActivationMeter
from farandole.layout.pipeline.micro import Micro, cut_batch
from farandole.layout.pipeline.predict import RowlessOutputError, joined, predict
from farandole.layout.pipeline.scaling import LossScale
from farandole.layout.pipeline.schedule_runner import ScheduleRunner
from farandole.layout.pipeline.stage import Stage
from farandole.layout.pipeline.update import Update
from farandole.layout.tile_groups import TileGroups


class Pipelined:
    """Made by `assemble`. Every method is called by all ranks of the pipeline together.

    When a stage fails or a rank is lost, all ranks raise `StageError` with the same reason, and the
    pipeline cannot be used any more. A `DivergedError` stays one on the ranks that have raised it.
    """

    def __init__(
        self,
        layout: Layout,
        pipe: Group,
        stages: Mapping[int, Stage],
        mail: Mail,
        update: Update,
        objective: Objective,
        *,
        seed: int,
        scale: LossScale | None = None,
        name: str,
        tile_group: Group | None = None,
        means: MaskedMeans | None = None,
    ) -> None:
        self.layout = layout
        self.pipe = pipe
        self.tile_group = tile_group  # the ranks with the other tiles, if there are any
        self.stages = stages
        self.steps = 0
        self._mail = mail
        self._update = update
        self._objective = objective
        self._means = means
        self._scale = scale
        self.runner = ScheduleRunner(layout, pipe, stages, mail, update, seed=seed, name=name)
        self._failures = self.runner.failures
        self.gradients_ready: Callable[[], None] = _nothing
        """Called by a synchronous scheme, when the gradients are ready and before the weights
        change."""

    def connect(self, exchange: Callable[[], None] | None, optimizer: Optimizer) -> None:
        """`exchange` takes the gradients through the gradient bridge and a strategy, if there is
        one."""
        self._update.connect(exchange, optimizer)

    def step(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Trains on one batch; returns its loss. A stream returns that of the last batch that this
        rank is done with, and NaN before there is one."""
        micros = self.micros(inputs, targets)
        scale = 1.0 if self._scale is None else self._scale.value
        if self.layout.streams:
            self.runner.turn(micros, self.steps, scale)
            loss = self.runner.last_loss
        else:
            loss = self.runner.step(micros, self.steps, scale)
            self._compare_means()
            loss = self._loss_of_all(loss)
            self.gradients_ready()
            with self.pipe.trace.span("weights", "stage"):
                self.runner.apply()
            self.runner.end_step()
        self.steps += 1
        return loss

    def micros(self, inputs: Any, targets: Any) -> list[Micro]:
        """A batch as the micro-batches that a step is made of."""
        return [
            micro._replace(inputs=self._objective.arguments(micro.inputs, micro.targets))
            for micro in cut_batch(
                inputs,
                targets,
                self.layout.microbatches,
                self.layout.reduction,
                self._objective.weight,
            )
        ]

    @property
    def device(self) -> torch.device:
        return self._mail.device

    def trial(self, micros: Sequence[Micro]) -> torch.Tensor:
        """The forwards and backwards of a step, without its update; returns the loss.

        Gradients stay on the weights, and are this rank's own until `add_up_gradients`. Buffers
        change. Nothing else notices that there was a trial.
        """
        # Invariant: training begins as if there had been no trial. Whatever counts or watches is
        # set aside, and put back even if the trial fails.
        meters = {stage: stage.meter for stage in self.stages.values()}
        for stage in self.stages.values():
            stage.meter = stage.means = None
        try:
            loss = self._loss_of_all(self.runner.trial(micros, self.steps))
            self.runner.end_step()
            return loss
        finally:
            for stage, meter in meters.items():
                stage.meter, stage.means = meter, self._means
                stage.module.forget_draws()
            self.runner.reloaded()

    def add_up_gradients(self) -> None:
        """After trials: the gradients of the whole replica, where several ranks hold a weight."""
        self._failures.guarded(self._update.add_up)

    def _loss_of_all(self, loss: torch.Tensor) -> torch.Tensor:
        """*Together.* Of the whole batch, where this rank has computed some of it."""
        if self.tile_group is not None:
            tile_group, own = self.tile_group, loss.to(self._mail.device, torch.float64)
            return self._failures.guarded(lambda: tile_group.all_reduce(own))
        if self._takes_turns:
            # A rank that had no micro-batch does not know in which precision others' losses are,
            # nor where.
            own = loss.to(self._mail.device, torch.float64)
            return self._failures.guarded(lambda: self._update.sum_over_holders(own))
        return loss

    def _compare_means(self) -> None:
        """Where several ranks have computed losses of one batch: each has compared its own."""
        if self._means is None or not (self.layout.mirrored or self._takes_turns):
            return
        # Each rank has compared the micro-batches that it has computed itself. One of each is
        # enough to compare across ranks, since those of one rank are alike.
        own = list(self._means.first_of(self.steps) or ())
        gathered = self._failures.guarded(lambda: self.pipe.gather_json(own))
        known = [(micro, samples, divisors) for micro, samples, divisors in filter(None, gathered)]
        for other in known[1:]:
            self._failures.guarded(partial(compare, known[0], other))

    def refusing(self, check: Callable[[], None]) -> None:
        """Whoever refuses to go on tells the others why, so that nobody waits."""
        self._failures.refusing(check)

    def predict(self, inputs: Any) -> Any:
        """What the whole model makes of `inputs`, in evaluation mode, on every rank."""
        self.runner.drain()
        # A model's own loss is of the whole batch, and cannot be put together from parts of it.
        count = self.layout.microbatches if self._objective.loss is not None else 1
        try:
            try:
                return self._predicted(inputs, count)
            except RowlessOutputError:  # on all ranks
                return self._predicted(inputs, 1)
        except RowlessOutputError as error:
            raise UserError(str(error)) from error

    def _predicted(self, inputs: Any, count: int) -> Any:
        micros = [
            micro._replace(inputs=arguments_of(micro.inputs))
            for micro in cut_batch(inputs, (), count, "mean")
        ]
        tile_groups = TileGroups(self.layout.group_sizes)
        outputs = self._failures.guarded(
            lambda: predict(
                self.pipe, self._mail, self.runner.places, tile_groups, self.stages, micros
            )
        )
        return joined(outputs)

    # Memory

    def measure(self) -> ActivationMeter:
        """From here on, until `stop_measuring`, what activations take is counted. It costs time."""
        meter = ActivationMeter()
        for stage in self.stages.values():
            stage.meter = meter
        return meter

    def stop_measuring(self) -> None:
        for stage in self.stages.values():
            stage.meter = None

    # The rest

    def state_dict(self) -> dict[str, Any]:
        """What must be remembered beside the weights."""
        scale = None if self._scale is None else self._scale.state_dict()
        return {"steps": self.steps, "scale": scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]
        if self._scale is not None and state["scale"] is not None:
            self._scale.load_state_dict(state["scale"])

    def close(self) -> None:
        self._mail.close()

    @property
    def _takes_turns(self) -> bool:
        """Whether this rank shares its stage's micro-batches with other ranks."""
        return max(self.layout.replicas, default=1) > 1


def _nothing() -> None:
    """Nobody wants to know."""

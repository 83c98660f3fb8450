"""A replica of the model at work on the ranks of a pipeline.

A synchronous scheme does its whole schedule in every step. A stream (PipeDream, 2BW) does its turn,
and what is under way stays under way until it is drained: at the end of a pass over the data, and
before anybody wants to see the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from farandole.comm import Group
from farandole.comm.p2p.mail import Mail
from farandole.errors import (
    UserError,
)
from farandole.layout.arguments import arguments_of
from farandole.layout.layout import Layout
from farandole.layout.objective import Objective
from farandole.layout.partition.stage_module import PassId
from farandole.layout.pipeline.failures import Failures
from farandole.layout.pipeline.interpreter import Feed, Interpreter
from farandole.layout.pipeline.masked_means import MaskedMeans, compare
from farandole.layout.pipeline.memory import ActivationMeter
from farandole.layout.pipeline.micro import Micro, cut_batch
from farandole.layout.pipeline.predict import RowlessOutputError, joined, predict
from farandole.layout.pipeline.scaling import LossScale
from farandole.layout.pipeline.stage import Stage
from farandole.layout.pipeline.update import Update
from farandole.layout.tile_groups import TileGroups
from farandole.schedule.pipelines import Action, Pipeline


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
        tile_groups = TileGroups(layout.group_sizes)
        self._place = tile_groups.place(pipe.rank)
        self.stages = stages
        self.steps = 0
        self._mail = mail
        self._update = update
        self._objective = objective
        self._means = means
        self._seed = seed
        self._scale = scale
        self._on_trial = False
        self._stream = layout.stream() if layout.streams else None
        self.turns = 0  # of the stream, since it was last drained
        self.before_update: Callable[[Sequence[int]], None] = _nothing
        """In a stream, is told which turns' batches are in the update that follows."""
        self._loss = torch.tensor(float("nan"))
        self.places = layout.pipeline() if self._stream is None else self._stream.unroll(1)
        self._interpreter = Interpreter(
            self.places, stages, mail, self._on_update, pipe.trace, tile_groups, pipe.rank
        )
        self._failures = Failures(name, mail, stages, self._interpreter)

    def connect(self, exchange: Callable[[], None] | None, optimizer: Optimizer) -> None:
        """`exchange` takes the gradients through the gradient bridge and a strategy, if there is
        one."""
        self._update.connect(exchange, optimizer)

    def step(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Trains on one batch; returns its loss. A stream returns that of the last batch that this
        rank is done with, and NaN before there is one."""
        micros = self.micros(inputs, targets)
        self._interpreter.loss_scale = 1.0 if self._scale is None else self._scale.value
        if self._stream is None:
            loss = self._whole_step(micros)
        else:
            self._turn(micros)
            loss = self._loss
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
        means, self._means = self._means, None
        for stage in self.stages.values():
            stage.meter = stage.means = None
        self._interpreter.loss_scale = 1.0
        self._on_trial = True
        try:
            if self._stream is None:
                return self._whole_step(micros)
            self._feed(micros, 0)
            actions = [*self._stream.turn(self._place, 0), *self._stream.drain(self._place, 1)]
            self._failures.guarded(lambda: self._perform(actions))
            self._interpreter.feeds.clear()
            return self._loss_of_all(self._loss_of_done())
        finally:
            self._on_trial = False
            self._means = means
            for stage, meter in meters.items():
                stage.meter, stage.means = meter, means
                stage.module.forget_draws()
            self.reloaded()

    def add_up_gradients(self) -> None:
        """After trials: the gradients of the whole replica, where several ranks hold a weight."""
        self._failures.guarded(self._update.add_up)

    def _whole_step(self, micros: Sequence[Micro]) -> torch.Tensor:
        # A small last batch makes fewer micro-batches, and so another schedule. All ranks cut the
        # same batch, so all of them find the same one.
        pipeline = self._pipeline(len(micros))
        self._interpreter.places = pipeline
        self._feed(micros, 0)
        self._failures.guarded(lambda: self._perform(pipeline.actions[self._place]))
        loss = self._loss_of_done()
        self._compare_means()
        loss = self._loss_of_all(loss)
        self._interpreter.feeds.clear()
        return loss

    def _perform(self, actions: Sequence[Action]) -> None:
        """Hooks of weights wait for the update, which comes last."""
        with self._update.hooks.held_back():
            self._interpreter.run(actions)
            self._update.hooks.refuse_new()

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
        own = list(self._means.first or ())
        told = self._failures.guarded(lambda: self.pipe.gather_json(own))
        known = [(micro, samples, divisors) for micro, samples, divisors in filter(None, told)]
        for other in known[1:]:
            self._failures.guarded(partial(compare, known[0], other))

    def _turn(self, micros: Sequence[Micro]) -> None:
        assert self._stream is not None
        wanted = self.layout.microbatches
        if len(micros) < wanted:
            raise UserError(
                f"{self.layout.schedule} wants {wanted} micro-batches, and this batch has "
                f"{len(micros)} samples. Use drop_last=True, or larger batches."
            )
        self._feed(micros, self.turns * wanted)
        actions = self._stream.turn(self._place, self.turns)
        self.turns += 1
        self._failures.guarded(lambda: self._perform(actions))

    def drain(self) -> None:
        """Brings everything that is under way to its end."""
        if self._stream is None or not self.turns:
            return
        # Afterwards versions and micro-batches are counted from 0 again, as the schedule counts
        # them.
        actions = self._stream.drain(self._place, self.turns)
        self.turns = 0
        self._failures.guarded(lambda: self._perform(actions))
        self._interpreter.feeds.clear()
        self.reloaded()

    def reloaded(self) -> None:
        """Somebody has changed the weights."""
        for stage in self.stages.values():
            stage.weights.updated(0)

    def refusing(self, check: Callable[[], None]) -> None:
        """Whoever refuses to go on tells the others why, so that nobody waits."""
        self._failures.refusing(check)

    def predict(self, inputs: Any) -> Any:
        """What the whole model makes of `inputs`, in evaluation mode, on every rank."""
        self.drain()
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
            lambda: predict(self.pipe, self._mail, self.places, tile_groups, self.stages, micros)
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

    @functools.lru_cache(maxsize=8)  # noqa: B019  (it lives as long as the run)
    def _pipeline(self, micros: int) -> Pipeline:
        return self.layout.pipeline(micros)

    def _feed(self, micros: Sequence[Micro], first: int) -> None:
        for index, micro in enumerate(micros):
            if self._is_mine(first + index):
                pass_id = PassId(self._seed, self.steps, index)
                self._interpreter.feeds[first + index] = Feed(micro, pass_id)

    def _is_mine(self, micro: int) -> bool:
        places = self._interpreter.places
        return any(
            self._place == places.home(stage, micro, replica)
            for replica in range(len(places.homes))
            for stage in self.stages
        )

    def _on_update(self, version: int) -> None:
        if self._on_trial:
            return
        done = set(self._interpreter.done)
        whole_batches = len(done) // self.layout.microbatches
        if self._stream is None:
            self._update()
            return
        # A strategy weighs uneven batches by the samples in them. In a stream, the batches of an
        # update are not those of the step that is being made, so they are named.
        self.before_update(sorted({micro // self.layout.microbatches for micro in done}))
        self._update(whole_batches)
        for stage in self.stages.values():
            stage.weights.updated(version)
        if done:
            self._loss = self._loss_of_done()
        for micro in done:
            del self._interpreter.feeds[micro]

    def _loss_of_done(self) -> torch.Tensor:
        """The loss of the micro-batches that are done, which are then forgotten."""
        done = sorted(set(self._interpreter.done))
        self._interpreter.done.clear()
        losses = [self._interpreter.losses.pop(micro) for micro in done]
        return torch.stack(losses).sum() if losses else torch.zeros(())


def _nothing(turns: Sequence[int]) -> None:
    """Nobody wants to know."""

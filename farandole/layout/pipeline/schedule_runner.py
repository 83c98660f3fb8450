"""Carries out the schedule of a pipeline on one rank: a whole step, or a turn of a stream.

A synchronous scheme does its whole schedule in every step. A stream (PipeDream, 2BW) does its turn,
and what is under way stays under way until it is drained: at the end of a pass over the data, and
before anybody wants to see the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch

from farandole.comm import Group
from farandole.comm.p2p.mail import Mail
from farandole.errors import UserError
from farandole.layout.layout import Layout
from farandole.layout.partition.stage_module import PassId
from farandole.layout.pipeline.failures import Failures
from farandole.layout.pipeline.interpreter import Feed, Interpreter
from farandole.layout.pipeline.micro import Micro
from farandole.layout.pipeline.stage import Stage
from farandole.layout.pipeline.update import Update
from farandole.layout.tile_groups import TileGroups
from farandole.schedule.pipelines import Action, Pipeline


class ScheduleRunner:
    """Every method is called by all ranks of the pipeline together. `name`: what the rank is called
    in messages."""

    def __init__(
        self,
        layout: Layout,
        pipe: Group,
        stages: Mapping[int, Stage],
        mail: Mail,
        update: Update,
        *,
        seed: int,
        name: str,
    ) -> None:
        tile_groups = TileGroups(layout.group_sizes)
        self._layout = layout
        self._place = tile_groups.place(pipe.rank)
        self._stages = stages
        self._update = update
        self._seed = seed
        self._on_trial = False
        self._stream = layout.stream() if layout.streams else None
        self.turns = 0  # of the stream, since it was last drained
        self.before_update: Callable[[Sequence[int]], None] = _nothing
        """In a stream, is told which turns' batches are in the update that follows."""
        self.last_loss = torch.tensor(float("nan"))
        """In a stream: of the last batch that this rank is done with; NaN before there is one."""
        self.places = layout.pipeline() if self._stream is None else self._stream.unroll(1)
        self._interpreter = Interpreter(
            self.places, stages, mail, self._on_update, pipe.trace, tile_groups, pipe.rank
        )
        self.failures = Failures(name, mail, stages, self._interpreter)

    def step(self, micros: Sequence[Micro], step: int, loss_scale: float) -> torch.Tensor:
        """All actions of one step of a synchronous scheme, up to the weights, which `apply`
        changes; returns this rank's part of the loss."""
        # A small last batch makes fewer micro-batches, and so another schedule. All ranks cut the
        # same batch, so all of them find the same one.
        pipeline = self._pipeline(len(micros))
        self._interpreter.loss_scale = loss_scale
        self._interpreter.places = pipeline
        self._feed(micros, 0, step)
        self.failures.guarded(lambda: self._perform(pipeline.actions[self._place]))
        return self._loss_of_done()

    def apply(self) -> None:
        """The weights change. Also where others have failed meanwhile, in what comes after."""
        self.failures.telling(self._update.apply)

    def end_step(self) -> None:
        """Forgets the batch. What is compared across ranks at the end of a step comes before."""
        self._interpreter.feeds.clear()

    def turn(self, micros: Sequence[Micro], step: int, loss_scale: float) -> None:
        """This rank's turn in one step call of a stream."""
        assert self._stream is not None
        wanted = self._layout.microbatches
        if len(micros) < wanted:
            raise UserError(
                f"{self._layout.schedule} wants {wanted} micro-batches, and this batch has "
                f"{len(micros)} samples. Use drop_last=True, or larger batches."
            )
        self._interpreter.loss_scale = loss_scale
        self._feed(micros, self.turns * wanted, step)
        actions = self._stream.turn(self._place, self.turns)
        self.turns += 1
        self.failures.guarded(lambda: self._perform(actions))

    def trial(self, micros: Sequence[Micro], step: int) -> torch.Tensor:
        """The forwards and backwards of a step, without its update; returns this rank's part of the
        loss. Gradients stay on the weights."""
        self._on_trial = True
        try:
            if self._stream is None:
                return self.step(micros, step, 1.0)
            self._interpreter.loss_scale = 1.0
            self._feed(micros, 0, step)
            actions = [*self._stream.turn(self._place, 0), *self._stream.drain(self._place, 1)]
            self.failures.guarded(lambda: self._perform(actions))
            return self._loss_of_done()
        finally:
            self._on_trial = False

    def drain(self) -> None:
        """Brings everything that is under way to its end."""
        if self._stream is None or not self.turns:
            return
        # Afterwards versions and micro-batches are counted from 0 again, as the schedule counts
        # them.
        actions = self._stream.drain(self._place, self.turns)
        self.turns = 0
        self.failures.guarded(lambda: self._perform(actions))
        self.end_step()
        self.reloaded()

    def reloaded(self) -> None:
        """Somebody has changed the weights: they are version 0 again."""
        for stage in self._stages.values():
            stage.weights.updated(0)

    def _perform(self, actions: Sequence[Action]) -> None:
        """Hooks of weights wait for the update, which comes last."""
        with self._update.hooks.held_back():
            self._interpreter.run(actions)
            self._update.hooks.refuse_new()

    @functools.lru_cache(maxsize=8)  # noqa: B019  (it lives as long as the run)
    def _pipeline(self, micros: int) -> Pipeline:
        return self._layout.pipeline(micros)

    def _feed(self, micros: Sequence[Micro], first: int, step: int) -> None:
        for index, micro in enumerate(micros):
            if self._is_mine(first + index):
                pass_id = PassId(self._seed, step, index)
                self._interpreter.feeds[first + index] = Feed(micro, pass_id)

    def _is_mine(self, micro: int) -> bool:
        places = self._interpreter.places
        return any(
            self._place == places.home(stage, micro, direction)
            for direction in range(len(places.homes))
            for stage in self._stages
        )

    def _on_update(self, version: int) -> None:
        if self._on_trial:
            return
        done = set(self._interpreter.done)
        whole_batches = len(done) // self._layout.microbatches
        if self._stream is None:
            self._update.prepare()  # the pipeline applies it, when the whole step has gone well
            return
        # A strategy weighs uneven batches by the samples in them. In a stream, the batches of an
        # update are not those of the step that is being made, so they are named.
        self.before_update(sorted({micro // self._layout.microbatches for micro in done}))
        self._update(whole_batches)
        for stage in self._stages.values():
            stage.weights.updated(version)
        if done:
            self.last_loss = self._loss_of_done()
        for micro in done:
            del self._interpreter.feeds[micro]

    def _loss_of_done(self) -> torch.Tensor:
        """The loss of the micro-batches that are done, which are then forgotten."""
        done = sorted(set(self._interpreter.done))
        self._interpreter.done.clear()
        if not done:
            return torch.zeros(())
        losses = [self._interpreter.losses.pop(micro) for micro in done]
        weights = [self._interpreter.feeds[micro].micro.weight for micro in done]
        return torch.stack(torch._foreach_mul(losses, weights)).sum()


def _nothing(turns: Sequence[int]) -> None:
    """No strategy wants to know."""

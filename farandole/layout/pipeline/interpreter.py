"""Carries out a schedule: what one rank does, action by action.

The schedule says all there is to say: which stage, which micro-batch, with which weights. What must
be there before is taken from the mail, what comes of it is posted to where the schedule says that
its next user lives. A gradient travels with the loss of its micro-batch, so every rank knows that
without another message.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from farandole.comm.p2p.links import Label
from farandole.comm.p2p.mail import Mail
from farandole.layout.partition.stage_module import PassId
from farandole.layout.pipeline.micro import Micro
from farandole.layout.pipeline.stage import Gradients, Stage
from farandole.layout.tile_groups import TileGroups
from farandole.schedule.pipelines import Action, Pipeline
from farandole.trace.spans import Trace

_FORWARD, _BACKWARD = 0, 1


class Feed(NamedTuple):
    """A micro-batch on its way through the stages."""

    micro: Micro
    pass_id: PassId


class Interpreter:
    """One rank at work. `update` is called for every `U`, with the version that it makes."""

    def __init__(
        self,
        places: Pipeline,
        stages: Mapping[int, Stage],
        mail: Mail,
        update: Callable[[int], None],
        trace: Trace,
        tile_groups: TileGroups,
        rank: int,
    ) -> None:
        self.places = places
        self._tile_groups = tile_groups
        self._shard = tile_groups.shard(rank)
        self._stages = stages
        self._mail = mail
        self._update = update
        self._trace = trace
        self.feeds: dict[int, Feed] = {}
        self.losses: dict[int, torch.Tensor] = {}
        """Of each micro-batch that this rank has computed the backward of, not weighed."""
        self.done: list[int] = []
        """The micro-batches that this rank is done with, for the caller to take away."""
        self.loss_scale = 1.0
        self.current: Action | None = None  # for whoever must say where it failed

    def run(self, actions: Sequence[Action]) -> None:
        """Does them in order. Everything in `feeds` that they need must be there."""
        # Announced before the first action, so that messages are received while the rank computes.
        # Each expected message is taken by exactly one action: the count is read off the same list.
        for source, count in self._senders(actions).items():
            self._mail.expect(source, count)
        closing = self._closing(actions)
        for index, action in enumerate(actions):
            self.current = action
            if action.kind == "U":
                with self._trace.span("update", "stage"):
                    self._update(action.version)
                continue
            if index in closing:
                self._stages[action.stage].check_means()
            self._do(action)
        self.current = None

    def _do(self, action: Action) -> None:
        stage = self._stages[action.stage]
        key = (action.direction, action.micro)
        if action.kind == "F":
            self._forward(action, stage, key)
        elif action.kind == "W":
            with self._working(action):
                stage.backward_weight(key)
        else:
            gradients = self._gradients(action)
            with self._working(action):
                whole = action.kind == "B"
                result = (stage.backward if whole else stage.backward_input)(key, gradients)
            # With a split backward the micro-batch counts as done after its first half. The second
            # half is local, and the schedule has it before the update.
            self.done.append(action.micro)
            if action.stage > 0:
                self._post(action, -1, _BACKWARD, (*result, self.losses[action.micro]))

    def _working(self, action: Action) -> AbstractContextManager[None]:
        return self._trace.span(_name_of(action), "stage")

    def _forward(self, action: Action, stage: Stage, key: tuple[int, int]) -> None:
        feed = self.feeds[action.micro]
        last = action.stage == self.places.stages - 1
        value = feed.micro.inputs
        if action.stage > 0:
            value = self._take(action, -1, _FORWARD)
        target = feed.micro.targets if last else None
        with self._working(action):
            result = stage.forward(
                key, value, feed.pass_id, action.version, target, feed.micro.rows
            )
        if last:
            self.losses[action.micro] = result.detach()
        else:
            self._post(action, 1, _FORWARD, result)

    def _gradients(self, action: Action) -> Gradients:
        if action.stage == self.places.stages - 1:
            # The gradient of the batch's loss with respect to this micro-batch's: its weight. It
            # makes the sum over micro-batches the gradient of the whole batch.
            weight = self.feeds[action.micro].micro.weight * self.loss_scale
            return [torch.full_like(self.losses[action.micro], weight)]
        if self._home(action, 1) is None:  # this shard ended here, and what it gave on is another's
            self.losses[action.micro] = torch.zeros(())
            return self._stages[action.stage].no_gradients((action.direction, action.micro))
        gradients: Gradients
        *gradients, self.losses[action.micro] = self._take(action, 1, _BACKWARD)
        return gradients

    def _take(self, action: Action, step: int, kind: int) -> Any:
        source = self._home(action, step)
        assert source is not None
        with self._trace.span(_name_of_wait(action.stage + step), "wait"):
            return self._mail.take(source, _label(kind, action))

    def _post(self, action: Action, step: int, kind: int, value: Any) -> None:
        to = self._home(action, step)
        if to is not None:
            self._mail.post(to, _label(kind, action, step), value)

    def _home(self, action: Action, step: int) -> int | None:
        """The rank of this shard at the stage before or after; None: the shard does not go
        there."""
        place = self.places.home(action.stage + step, action.micro, action.direction)
        return self._tile_groups.rank(place, self._shard)

    def _closing(self, actions: Sequence[Action]) -> set[int]:
        """Where the last backward of the loss before an update stands: all micro-batches of the
        update have had their forward by then, and ranks that would update still wait for it."""
        found: set[int] = set()
        ends = True
        for index in range(len(actions) - 1, -1, -1):
            action = actions[index]
            if action.kind == "U":
                ends = True
            elif ends and action.kind in "BI" and action.stage == self.places.stages - 1:
                found.add(index)
                ends = False
        return found

    def _senders(self, actions: Sequence[Action]) -> Counter[int]:
        """How many messages come from each rank."""
        senders: Counter[int] = Counter()
        for action in actions:
            neighbour = action.stage - 1 if action.kind == "F" else action.stage + 1
            if action.kind in "FBI" and 0 <= neighbour < self.places.stages:
                source = self._home(action, neighbour - action.stage)
                if source is not None:
                    senders[source] += 1
        return senders


@functools.lru_cache(maxsize=4096)
def _name_of(action: Action) -> str:
    """Kept, for most runs are not traced, and nobody reads it."""
    return f"{action} stage {action.stage}"


@functools.lru_cache(maxsize=256)
def _name_of_wait(stage: int) -> str:
    return f"waiting for stage {stage}"


def _label(kind: int, action: Action, step: int = 0) -> Label:
    """Of a message for this action, or for the one so many stages further."""
    return kind, action.stage + step, action.micro, action.direction

"""DASO's exchange between hosts: one worker of each sends the model while all train on.

    host 0   rank 0  ═ B steps ═╦═ S steps ═╗                 ═ B steps ═ …
             rank 1  ═══════════╬═══════════╬═ merge ═        ═══════════╦═ …   the next one sends
                                ║ all-reduce║                            ║
    host 1   rank 2  ═══════════╩═══════════╝                            ║
             rank 3  ═════════════════════════ merge ═        ═══════════╩═ …

1. After B steps, one worker of each host (the group whose turn it is) copies its parameters and
   starts an all-reduce of them, in the background.
2. Everybody trains on. S steps later the worker has the average x̄ of all hosts, and gives it to the
   others of its host.
3. Everyone merges: x ← (2S·x + N·x̄) / (2S + N), for N hosts.

A host counts by its workers, so that the average is that of all workers. With a codec, what travels
is how far the host has moved since the last exchange, and only that is rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from farandole.comm import Group
from farandole.comm.codecs import Codec
from farandole.comm.queue import Handle
from farandole.sync.common.flat import Flat, statistics_of, weights_of


@dataclass
class _Exchange:
    """An exchange that is under way."""

    turn: int
    age: int  # steps since it began
    handle: Handle[None] | None  # None: this rank did not send, or it has arrived already


class HostExchange:
    """This rank's part in the exchanges of one model. All ranks call everything together."""

    def __init__(self, model: nn.Module, group: Group, codec: Codec | None) -> None:
        hosts = group.topology.hosts
        here = group.topology.host(group.rank).ranks
        self._model = model
        self._codec = codec
        self._rank = group.rank
        self._here = here
        self.local: Group | None = group.subgroup(here) if len(here) > 1 else None
        """The workers of this host, if there are others than this one."""
        self._teams: list[Group | None] = []
        # Making a group is a collective, so every rank walks through all turns in the same order,
        # also those in which it does not send. On a host with few workers they take turns twice.
        for turn in range(max(len(host.ranks) for host in hosts)):
            ranks = [host.ranks[turn % len(host.ranks)] for host in hosts]
            self._teams.append(group.subgroup(ranks) if group.rank in ranks else None)
        self._hosts = len(hosts)
        self._host_weight = len(here) * len(hosts) / group.size  # 1 if all have as many workers
        self._turn = 0
        self._flat = Flat({})
        self._base: list[torch.Tensor] = []  # with a codec: what all hosts last averaged
        self._exchange: _Exchange | None = None
        self._arrived_age = 0  # of the exchange that is to be merged

    @property
    def under_way(self) -> bool:
        return self._exchange is not None

    @property
    def age(self) -> int:
        """Steps since the exchange under way began."""
        return 0 if self._exchange is None else self._exchange.age

    def step(self) -> None:
        if self._exchange is not None:
            self._exchange.age += 1

    def begin(self) -> None:
        """Starts a series of exchanges. All ranks hold the same model now."""
        self._copy_model()
        if self._codec is not None:
            # Hosts send their distance from the base, so it must be the same bits everywhere. Here
            # it is, because the ranks are in step.
            self._base = self._flat.copies()

    def culprit(self) -> str | None:
        """Copies this rank's model into the buffers to be sent; names what is not finite in it."""
        self._copy_model()
        return None if self._flat.is_finite() else self._flat.first_not_finite()

    def start(self, *, spoiled: bool = False) -> None:
        """Step 1, with what `culprit` has copied.

        A host whose training has failed sends NaN. All hosts then find it in the same `merge`, and
        stop together.
        """
        if spoiled:
            # Leaving out the exchange instead would leave the other hosts waiting in theirs.
            for buffer in self._flat.buffers:
                buffer.fill_(torch.nan)
        turn, self._turn = self._turn, (self._turn + 1) % len(self._teams)
        team = self._teams[turn] if self._sender(turn) == self._rank else None
        # From here to `arrive` the buffers belong to the background thread. Training changes the
        # model's own tensors, of which the buffers are copies.
        handle = team.start(self._average, team) if team is not None else None
        # Ranks that do not send keep the same record: all of them must count the same age.
        self._exchange = _Exchange(turn, 0, handle)

    def arrive(self) -> bool:
        """Step 2. Waits if the average has not arrived; returns whether it is finite."""
        assert self._exchange is not None
        exchange, self._exchange = self._exchange, None
        if exchange.handle is not None:
            exchange.handle.wait()
        # Only the sender has the average. The others of this host still hold their own copies in
        # the buffers, which this replaces; after that the buffers are alike on all ranks.
        if self.local is not None:
            source = self._here.index(self._sender(exchange.turn))
            for buffer in self._flat.buffers:
                self.local.broadcast(buffer, source)
        self._arrived_age = exchange.age
        return self._flat.is_finite()

    def merge(self) -> None:
        """Step 3.

        The average is S steps old, and this host has gone S steps further meanwhile. Its own model
        weighs 2S to the N of the average: the staler the average, the less it pulls. All ranks use
        the same S and N, so ranks that were alike before are alike after.
        """
        if self._codec is not None:
            # The base stays the same bits on all ranks, because all add the same decoded average to
            # it. If it differed, hosts would send distances from different points.
            for buffer, where in zip(self._flat.buffers, self._base, strict=True):
                where.add_(buffer)
                buffer.copy_(where)
        self._flat.pull(self._hosts / (2 * self._arrived_age + self._hosts))

    def _sender(self, turn: int) -> int:
        return self._here[turn % len(self._here)]

    def _average(self, team: Group) -> None:
        """In the background: nobody else touches the buffers until `arrive`."""
        if self._codec is None:
            for buffer in self._flat.buffers:
                # The team has one rank of each host, so its average counts hosts. Scaled before by
                # workers of the host over the mean of all hosts, it counts workers.
                _scale(buffer, self._host_weight)
                team.all_reduce(buffer, "average")
            return
        for buffer, where in zip(self._flat.buffers, self._base, strict=True):
            _scale(buffer.sub_(where), self._host_weight)
        # Nothing is remembered from one exchange to the next: what a codec leaves out of a host's
        # way is still in its model, and so in the way that it sends the next time.
        self._codec.build().average(self._flat.views, team)

    def _copy_model(self) -> None:
        weights = weights_of(self._model, known=list(self._flat.views))
        tensors = {**weights, **statistics_of(self._model)}
        if not self._flat.holds(tensors):
            before, self._flat = self._flat, Flat(tensors)
            if self._base:  # what is new was the same everywhere until now
                self._base = self._flat.carry_over(before, self._base)
        self._flat.gather()

    def state_dict(self) -> dict[str, Any]:
        """Waits for the exchange under way, and saves its average without merging it."""
        # Merging here would make a run that saves differ from one that does not. The resumed run
        # merges when the exchange has the age at which this run would have merged it.
        state: dict[str, Any] = {"turn": self._turn, "base": list(self._base)}
        if self._exchange is not None:
            if self._exchange.handle is not None:
                self._exchange.handle.wait()
            state["exchange"] = {
                "turn": self._exchange.turn,
                "age": self._exchange.age,
                "arrived": self._flat.copies(),
            }
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._copy_model()
        self._turn = state["turn"]
        self._base = [
            value.to(buffer.device, copy=True)
            for value, buffer in zip(state["base"], self._flat.buffers, strict=False)
        ]
        self._exchange = None
        if "exchange" in state:
            saved = state["exchange"]
            self._exchange = _Exchange(saved["turn"], saved["age"], None)
            # After `_copy_model`, which has filled the buffers with the model.
            for buffer, arrived in zip(self._flat.buffers, saved["arrived"], strict=True):
                buffer.copy_(arrived)


def _scale(buffer: torch.Tensor, factor: float) -> None:
    if factor != 1.0:
        buffer.mul_(factor)

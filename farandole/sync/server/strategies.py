"""The strategies that keep the model on parameter servers: `server` and `downpour`.

`staleness` and `downpour` do the work. They are imported when they are used: they need pyzmq.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal

from torch import nn
from torch.optim import Optimizer

from farandole.comm import Group
from farandole.errors import UserError
from farandole.sync.base import (
    Strategy,
    Synchronizer,
    require_at_least,
    require_choices,
    require_optimizer,
)
from farandole.sync.common.alignment import check_same_model, spread_from_first
from farandole.topology import Topology

Staleness = int | Literal["bsp", "async"]


def read_staleness(text: str) -> Staleness:
    if text == "bsp":
        return "bsp"
    if text == "async":
        return "async"
    try:
        return int(text)
    except ValueError:
        raise UserError(
            f"strategy 'server': staleness={text!r} is neither a number of clocks nor bsp or async."
        ) from None


@dataclasses.dataclass(frozen=True)
class Server(Strategy):
    """Parameter servers keep the model; workers push gradients and read it back."""

    name: ClassVar[str] = "server"
    needs_servers: ClassVar[bool] = True
    shorthands: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"bsp": "staleness=bsp", "async": "staleness=async"}
    )

    staleness: Staleness = dataclasses.field(default="bsp", metadata={"parse": read_staleness})
    backups: int = 0  # with bsp: a clock does not wait for the slowest so many
    update: Literal["server", "worker"] = "server"  # where the optimizer's step is taken
    overlap: bool = False  # a read may take until the step after the next

    def __post_init__(self) -> None:
        if self.staleness not in ("bsp", "async"):
            read_staleness(str(self.staleness))
            require_at_least(self, "staleness", 0)
        require_at_least(self, "backups", 0)
        require_choices(self)
        if self.backups and not self.is_synchronous:
            raise UserError(
                f"server: backups={self.backups} is for bsp; with staleness={self.staleness} "
                "nobody waits for the slowest anyway."
            )
        if self.overlap and self.is_synchronous:
            raise UserError(
                "server: overlap is for a staleness of 1 or more, and for async: with bsp all wait."
            )

    @property
    def is_synchronous(self) -> bool:
        return self.staleness in ("bsp", 0)

    def check_place(self, topology: Topology, device: str = "cpu") -> None:
        if self.backups >= topology.size:
            raise UserError(
                f"server: backups={self.backups} of {topology.size} workers leave nobody to wait "
                "for."
            )

    def build(self, model: nn.Module, optimizer: Optimizer | None, group: Group) -> Synchronizer:
        given = require_optimizer(self, optimizer)
        self.check_place(group.topology)
        if self.update == "server" and _has_stepped(given):
            raise UserError(
                "server: this optimizer has a state already, and the servers' would begin without "
                "one. Load it with run.load after run.distribute, or use update=worker."
            )
        from farandole.server.rules import rule_of
        from farandole.sync.server.staleness import StalenessSynchronizer
        from farandole.sync.server.untouched import refuse_limited_weights

        if self.update == "server":
            refuse_limited_weights(model, "update=worker")
        for settings in given.param_groups if self.update == "server" else ():
            rule_of(settings, given)  # refused before anything is connected
        _prepare(model, given, group)
        return StalenessSynchronizer(self, model, given, group)


@dataclasses.dataclass(frozen=True)
class Downpour(Strategy):
    """DistBelief's asynchronous SGD: local steps, gradients pushed now and then, and a rule on the
    servers that suits the script's optimizer: Adagrad for SGD."""

    name: ClassVar[str] = "downpour"
    needs_servers: ClassVar[bool] = True

    push: int = 1  # gradients are pushed after so many steps
    fetch: int = 1  # and parameters read
    warmstart: int = 0  # so many steps rank 0 takes before the others begin
    gain: float | None = None  # the servers have so many times the script's learning rate

    def __post_init__(self) -> None:
        require_at_least(self, "push", 1)
        require_at_least(self, "fetch", 1)
        require_at_least(self, "warmstart", 0)
        if self.gain is not None and not 0 < self.gain < math.inf:
            raise UserError(f"downpour: gain={self.gain:g} must be above 0, and finite.")

    def build(self, model: nn.Module, optimizer: Optimizer | None, group: Group) -> Synchronizer:
        from farandole.sync.server.downpour import DownpourSynchronizer
        from farandole.sync.server.downpour_rule import server_step
        from farandole.sync.server.untouched import refuse_limited_weights

        refuse_limited_weights(model, "--sync server:async,update=worker")
        given = require_optimizer(self, optimizer)
        for settings in given.param_groups:
            server_step(settings, given, push=self.push, workers=group.size, gain=self.gain)
        _prepare(model, given, group)
        return DownpourSynchronizer(self, model, given, group)


def _has_stepped(optimizer: Optimizer) -> bool:
    """Adagrad's state is there before its first step."""
    return any(float(state.get("step", 1)) > 0 for state in optimizer.state.values() if state)


def _prepare(model: nn.Module, optimizer: Optimizer, group: Group) -> None:
    """What is trained comes from the servers; what else there is, from rank 0."""
    check_same_model(model, group)
    trained = {p for settings in optimizer.param_groups for p in settings["params"]}
    others = [p for p in model.parameters() if p not in trained or not p.requires_grad]
    group.broadcast_all([*others, *model.buffers()])
    spread_from_first(nn.Module(), optimizer, group)  # its state and its options

"""Hogwild: all ranks of a host train one model in shared memory, without waiting for each other.

Each rank computes a gradient and applies its optimizer's step to the common parameters, without a
lock. Two ranks that write the same number at once may lose one of the two changes, and a rank may
read what another has half written. Where gradients are sparse that is rare; where steps are small
it does little harm (Niu, Recht, Ré and Wright, "Hogwild!", 2011).

    rank 0   ─forward─backward─step─forward─backward─step─
                                 ▼                     ▼
    x        ────────────────────x──x──────────x───────x──   one memory
                                    ▲          ▲
    rank 1   ────forward─backward─step─forward─step───────

Under all-reduce N ranks take one step together; here they take N. So that one learning rate means
the same under both, each step is taken at its share of the rate, η/N. It is the rate that is
scaled, not the gradient: that is right for Adam, for momentum and for weight decay alike.

Ranks meet at both ends of each pass over the data. Between two passes the parameters do not change,
because no rank takes a step before all have begun the next pass. So ranks evaluate and save one
model.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from farandole.comm import Group
from farandole.errors import CommError, UserError
from farandole.sync.base import Strategy, Synchronizer, require_choices
from farandole.sync.common.closures import with_gradients
from farandole.sync.common.flat import Flat, load_buffers, statistics_of
from farandole.sync.common.guard import Culprit, GradientGuard
from farandole.sync.common.weighing import Weighing
from farandole.sync.hogwild.shared_parameters import SharedParameters
from farandole.sync.periodic.local import prepare
from farandole.topology import Topology


@dataclasses.dataclass(frozen=True)
class Hogwild(Strategy):
    """All ranks of one host train the same parameters in shared memory, without locks."""

    name: ClassVar[str] = "hogwild"

    rate: Literal["share", "whole"] = "share"  # of the learning rate, for each rank's step

    def __post_init__(self) -> None:
        require_choices(self)

    def check_place(self, topology: Topology, device: str = "cpu") -> None:
        if len(topology.hosts) > 1:
            raise UserError(
                f"hogwild trains in the memory of one host, and the {topology.size} ranks are on "
                f"{len(topology.hosts)}: {topology}. Use `local` or `server:async` there."
            )
        if device != "cpu":
            raise _not_on_cpus(f"the ranks compute on {device}")

    def build(self, model: nn.Module, optimizer: Optimizer | None, group: Group) -> Synchronizer:
        self.check_place(group.topology)
        for name, parameter in model.named_parameters():
            if parameter.device.type != "cpu":
                raise _not_on_cpus(f"{name!r} is on {parameter.device}")
        given = prepare(self, model, optimizer, group, None)
        return _HogwildAtWork(self, model, given, group)


class _HogwildAtWork(Synchronizer):
    def __init__(
        self, config: Hogwild, model: nn.Module, optimizer: Optimizer, group: Group
    ) -> None:
        self._steps = 0
        self._guard = GradientGuard(model, optimizer, group, act=self._on_culprit, by_hand=True)
        self._guard.count = lambda: self._steps
        super().__init__(model, Weighing(model), guard=self._guard)
        self._group = group
        self._optimizer = optimizer
        self._shared = SharedParameters(model, group)
        self._share = 1.0 if config.rate == "whole" else 1 / group.size
        self._rates: list[tuple[dict[str, Any], Any]] = []  # while a step is taken: the script's
        # Invariant: no rank steps while another is between two passes. The barriers of `end_pass`
        # and of the first `begin_step` keep it: the second opens when all have begun their pass.
        self._resting = True
        optimizer.register_step_pre_hook(self._about_to_step)
        optimizer.register_step_post_hook(lambda *_: self._give_rates_back())

    def begin_step(self, weight: float, progress: float | None, samples: float) -> None:
        if self._resting:
            self._meet()
            self._resting = False
        super().begin_step(weight, progress, samples)

    def end_pass(self) -> None:
        super().end_pass()
        self._shared.require(self.model.parameters())
        self._meet()  # behind this barrier no rank steps
        self._average_statistics().scatter()
        self._resting = True

    def _about_to_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self._give_rates_back()  # a step that raised an error has kept them
        self._steps += 1
        arguments = with_gradients(args, kwargs, self._check_gradients)
        self._take_share()
        return arguments

    def _trained(self) -> list[torch.Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _check_gradients(self) -> None:
        """Stops before a gradient that is not finite is written into the shared parameters."""
        # There is no average in which all ranks would find a NaN together. A NaN that is written
        # once is in everybody's next forward pass, so each rank looks before each of its steps.
        self._shared.require(p for p in self._trained() if p.grad is not None)
        if self._guard.is_on:
            self._heed()
            self._guard.look()

    def _on_culprit(self, found: Culprit) -> None:
        """Announces the culprit in shared memory, where each rank looks before its next step."""
        self._shared.announce(json.dumps(found).encode())
        raise found.error

    def _heed(self) -> None:
        """Raises what another rank has announced."""
        announced = self._shared.announced()
        if announced is not None:
            raise Culprit(*json.loads(announced)).error

    def _meet(self) -> None:
        """*Together.* A barrier. Raises what a rank that has stopped has announced."""
        try:
            self._group.barrier()
        except CommError:
            self._heed()
            raise

    def _take_share(self) -> None:
        for group in self._optimizer.param_groups:
            self._rates.append((group, group["lr"]))
            # Not in place: a rate that is a tensor may be shared with a scheduler.
            group["lr"] = group["lr"] * self._share

    def _give_rates_back(self) -> None:
        for group, rate in self._rates:
            group["lr"] = rate
        self._rates.clear()

    def _average_statistics(self) -> Flat:
        """The average of all ranks' BatchNorm statistics, not yet in the model."""
        statistics = Flat(statistics_of(self.model))
        statistics.gather()
        for buffer in statistics.buffers:
            self._group.all_reduce(buffer, "average")
        return statistics

    def whole_model(self) -> dict[str, Any]:
        self._meet()  # nobody steps until all have saved
        own = Flat(statistics_of(self.model))
        own.gather()
        self._average_statistics().scatter()
        state = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in self.model.state_dict().items()
        }
        own.scatter()
        return state

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self._steps,
            "optimizer": self._optimizer.state_dict(),
            "buffers": dict(self.model.named_buffers()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps = state["steps"]
        self._optimizer.load_state_dict(state["optimizer"])
        load_buffers(self.model, state["buffers"])
        # The parameters were loaded before, by every rank into the same memory. A rank that still
        # loads would undo the steps of one that already trains.
        self._group.barrier()


def _not_on_cpus(found: str) -> UserError:
    return UserError(
        f"hogwild trains in the memory of CPUs, and {found}. Hide the GPUs "
        "(`CUDA_VISIBLE_DEVICES= farandole run …`), or use `allreduce`."
    )

"""An optimizer's state in two parts: a plan, which is plain data, and the tensors.

A rank that has no state yet learns from the plan what tensors are to come, makes room for them, and
takes them over when they are there. No step is made up to bring a state into being, so parameters
and momenta stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from farandole.errors import UserError


@dataclass(frozen=True)
class Slot:
    """A tensor of the plan, without its numbers."""

    number: int
    dtype: torch.dtype
    shape: torch.Size
    with_parameter: bool
    """On the parameter's device. Others, such as counts of steps, stay on the CPU."""


@dataclass
class StatePlan:
    """An optimizer's state, with slots or tensors in it. By group, and in it by parameter."""

    shapes: list[list[torch.Size]]  # of the parameters
    options: list[dict[str, Any]]
    states: list[list[Any]]  # None: the parameter has none
    others: dict[Any, Any]  # what belongs to no parameter

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> tuple[StatePlan, list[torch.Tensor]]:
        """The plan of an optimizer's state, and the tensors by the number of their slot."""
        tensors: list[torch.Tensor] = []

        def slot(tensor: torch.Tensor, device: torch.device) -> Any:
            if tensor.layout is not torch.strided:  # goes along in the plan
                return tensor
            tensors.append(tensor)
            beside = tensor.device == device
            return Slot(len(tensors) - 1, tensor.dtype, tensor.shape, beside)

        groups = optimizer.param_groups
        return cls(
            shapes=_shapes(optimizer),
            options=[{k: v for k, v in group.items() if k != "params"} for group in groups],
            states=[[optimizer.state.get(p) for p in group["params"]] for group in groups],
            others={
                key: value
                for key, value in optimizer.state.items()
                if not isinstance(key, torch.Tensor)
            },
        )._mapped(torch.Tensor, slot, optimizer), tensors

    def filled(self, optimizer: torch.optim.Optimizer) -> tuple[StatePlan, list[torch.Tensor]]:
        """The same with room for tensors in place of the slots, and these by number."""
        tensors: dict[int, torch.Tensor] = {}

        def room(slot: Slot, device: torch.device) -> torch.Tensor:
            where = device if slot.with_parameter else torch.device("cpu")
            tensors[slot.number] = torch.empty(slot.shape, dtype=slot.dtype, device=where)
            return tensors[slot.number]

        filled = self._mapped(Slot, room, optimizer)
        return filled, [tensors[number] for number in sorted(tensors)]

    def _mapped(
        self,
        kind: type,
        change: Callable[[Any, torch.device], Any],
        optimizer: torch.optim.Optimizer,
    ) -> StatePlan:
        """The same with everything of a kind changed; `change` is told the parameter's device."""
        devices = [[p.device for p in group["params"]] for group in optimizer.param_groups]
        cpu = torch.device("cpu")

        def device(group: int, place: int) -> torch.device:
            """The CPU when there is no such parameter here, which is an error to be told later."""
            known = devices[group] if group < len(devices) else []
            return known[place] if place < len(known) else cpu

        def mapped(value: Any, group: int, place: int) -> Any:
            where = device(group, place)
            return pytree.tree_map_only(kind, lambda leaf: change(leaf, where), value)

        return StatePlan(
            self.shapes,
            [mapped(options, i, 0) for i, options in enumerate(self.options)],
            [
                [mapped(state, i, j) for j, state in enumerate(states)]
                for i, states in enumerate(self.states)
            ],
            mapped(self.others, 0, 0),
        )

    def check(
        self, optimizer: torch.optim.Optimizer, root_rank: int, model: nn.Module | None
    ) -> None:
        """Raises `UserError` when the optimizer is not for parameters of these shapes."""
        mine = _shapes(optimizer)
        root = f"rank {root_rank}'s"
        counts, theirs = [len(group) for group in mine], [len(group) for group in self.shapes]
        if counts != theirs:
            raise UserError(
                f"this rank's optimizer has groups of {counts} parameters, {root} of {theirs}. "
                "Make the same optimizer on all ranks."
            )
        names = {id(p): name for name, p in model.named_parameters()} if model is not None else {}
        for i, group in enumerate(optimizer.param_groups):
            for j, parameter in enumerate(group["params"]):
                if mine[i][j] != self.shapes[i][j]:
                    name = names.get(id(parameter), f"parameter {j} of group {i}")
                    raise UserError(
                        f"{name} has shape {tuple(mine[i][j])} in this rank's optimizer and "
                        f"{tuple(self.shapes[i][j])} in {root}. Make the same model on all ranks."
                    )

    def give_to(self, optimizer: torch.optim.Optimizer) -> None:
        """Replaces the optimizer's state and options. Groups stay the same objects: schedulers know
        them."""
        optimizer.state.clear()
        for group, options, states in zip(
            optimizer.param_groups, self.options, self.states, strict=True
        ):
            parameters = group["params"]
            group.clear()
            group.update(params=parameters, **options)
            for parameter, state in zip(parameters, states, strict=True):
                if state is not None:
                    optimizer.state[parameter] = state
        optimizer.state.update(self.others)


def _shapes(optimizer: torch.optim.Optimizer) -> list[list[torch.Size]]:
    return [[p.shape for p in group["params"]] for group in optimizer.param_groups]

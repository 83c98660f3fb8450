"""An optimizer's state by the names of its parameters, so that it can be put back elsewhere.

PyTorch numbers parameters in the order in which an optimizer was given them. An optimizer of one
stage, of another cut or of the whole model numbers them otherwise; names stay what they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from farandole.train.same_optimizer import kind_of, require_same_groups

Names = Mapping[int, str]
"""Of parameters, by their identity: the name in the whole model."""


def names_of(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def state_by_name(optimizer: Optimizer, names: Names) -> dict[str, Any]:
    """What `load_by_name` takes. Parameters without a name, which no model knows, are left out."""
    state = optimizer.state_dict()
    by_number = _numbered(optimizer, names)
    return {
        "kind": kind_of(optimizer),
        "named": {
            by_number[number]: value
            for number, value in state["state"].items()
            if number in by_number
        },
        "groups": [
            {
                **{key: value for key, value in group.items() if key != "params"},
                "names": [by_number[number] for number in group["params"] if number in by_number],
            }
            for group in state["param_groups"]
        ],
    }


def load_by_name(
    optimizer: Optimizer, saved: Mapping[str, Any], names: Names, *, whole: bool
) -> None:
    """Puts back what `state_by_name` saved, of this optimizer or of one with other parameters.

    Options, such as the learning rate, are those of the saved group that a group's first parameter
    was in. `whole`: the optimizer has all parameters that were saved; else, those of a stage.

    Raises `OtherOptimizer` where the parameters are not in groups as they were.
    """
    state = optimizer.state_dict()
    by_number = _numbered(optimizer, names)
    group_of: dict[str, Mapping[str, Any]] = {
        name: group for group in saved["groups"] for name in group["names"]
    }
    known = [
        [by_number[number] for number in group["params"] if number in by_number]
        for group in state["param_groups"]
    ]
    require_same_groups(saved["groups"], known, whole=whole)
    for group, members in zip(state["param_groups"], known, strict=True):
        source = next((group_of[name] for name in members if name in group_of), {})
        group.update({key: source[key] for key in source if key not in ("names", "saved_in_part")})
    state["state"] = {
        number: saved["named"][name] for number, name in by_number.items() if name in saved["named"]
    }
    optimizer.load_state_dict(state)


def merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The states of several optimizers, each of other parameters, as one."""
    named: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for number, part in enumerate(parts):
        named.update(part["named"])
        groups += [{**group, "saved_in_part": number} for group in part["groups"]]
    return {"kind": parts[0].get("kind"), "named": named, "groups": groups}


def _numbered(optimizer: Optimizer, names: Names) -> dict[int, str]:
    """The names by the numbers that PyTorch gives to parameters in a state dict."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    return {number: names[id(each)] for number, each in enumerate(parameters) if id(each) in names}

"""An optimizer's state by the names of its parameters, so that it can be put back elsewhere.

PyTorch numbers parameters in the order in which an optimizer was given them. An optimizer of one
stage, of another cut or of the whole model numbers them otherwise; names stay what they are.

`torch.distributed.checkpoint.state_dict` has helpers for this. They do not keep what is kept here:
saving must not change training, and every state that `Optimizer.state_dict` returns must come back.
docs/checkpoints.md names the cases in which they fail. Where an optimizer has no state yet they
call its `step`, which also runs the hooks by which strategies count steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from farandole.train.checkpoint.same_optimizer import kind_of, require_same_groups

Names = Mapping[int, str]
"""Of parameters, by their identity: the name in the whole model."""

_NO_OPTIONS: Final = frozenset({"names", "saved_in_part", "params"})
_PER_ELEMENT: Final = frozenset(
    {
        "momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg",
        "grad_avg", "acc_delta", "sum", "prev", "step_size", "ax",
    }
)  # fmt: skip
"""What torch's optimizers keep in the shape of a parameter."""


def names_of(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def state_by_name(optimizer: Optimizer, names: Names) -> dict[str, Any]:
    """What `numbered_state` takes. Parameters without a name, which no model has, are left out."""
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


def numbered_state(
    optimizer: Optimizer, saved: Mapping[str, Any], names: Names, *, whole: bool
) -> dict[str, Any]:
    """What `state_by_name` saved, of this optimizer or of one with other parameters, as PyTorch
    loads it. Changes nothing.

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
    groups = []
    for group, members in zip(state["param_groups"], known, strict=True):
        source = next((group_of[name] for name in members if name in group_of), {})
        options = {key: source[key] for key in source if key not in _NO_OPTIONS}
        groups.append({**group, **options})
    values = {
        number: saved["named"][name] for number, name in by_number.items() if name in saved["named"]
    }
    return {**state, "state": values, "param_groups": groups}


def require_fitting_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Raises `ValueError` for a state, as PyTorch loads it, that it would take and fail by later.

    What is kept of each parameter is checked for torch's own optimizers: others may keep anything.
    """
    known = kind_of(optimizer).startswith("torch.optim.")
    groups = state["param_groups"]
    if [len(group["params"]) for group in groups] != [
        len(group["params"]) for group in optimizer.param_groups
    ]:
        raise ValueError("its optimizer has other groups of parameters than this script's")
    if known:
        _require_alike([each for each in state["state"].values() if each])
    for saved, here in zip(groups, optimizer.param_groups, strict=True):
        for number, parameter in zip(saved["params"], here["params"], strict=True) if known else ():
            _require_fitting(state["state"].get(number, {}), parameter)
        for key, value in here.items():
            if key in saved and key != "params" and not _is_like(saved[key], value):
                raise ValueError(f"{key} of its optimizer is {str(saved[key])[:40]!r}")


def _require_alike(states: Sequence[Any]) -> None:
    """Torch's own optimizers keep the same of every parameter that they keep anything of."""
    kept = {frozenset(each) for each in states if isinstance(each, Mapping)}
    if len(kept) > 1:
        one, other = sorted(sorted(map(str, keys)) for keys in list(kept)[:2])
        raise ValueError(f"its optimizer keeps {one} of one parameter and {other} of another")


def _require_fitting(state: Any, parameter: torch.Tensor) -> None:
    if not isinstance(state, Mapping):
        raise ValueError("the state of a parameter in its optimizer is none")
    for key, value in state.items():
        if key == "step" and not _is_like(value, 0):
            raise ValueError(f"step of its optimizer is {str(value)[:40]!r}")
        if key not in _PER_ELEMENT or value is None:
            continue
        if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
            found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(
                f"{key} of its optimizer is {found} for a parameter of {tuple(parameter.shape)}"
            )


def _is_like(saved: Any, here: Any) -> bool:
    """Can this value of an option stand where the other one is?"""
    if isinstance(saved, torch.Tensor):
        return saved.numel() == 1
    if isinstance(here, bool) or here is None:  # some options are True, False or to be found out
        return saved is None or isinstance(saved, (bool, int, float, str))
    if isinstance(here, (int, float, torch.Tensor)):
        return isinstance(saved, (int, float))
    if isinstance(here, (tuple, list)):
        return isinstance(saved, (tuple, list)) and len(saved) == len(here)
    return True


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

"""Whether a saved optimizer's state is one for this optimizer.

PyTorch takes any state that has the right number of groups and parameters, and fails, or does not
learn, some steps later. So a checkpoint says of which class its optimizer was, and which parameters
were in a group together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from torch.optim import Optimizer

_NOTED: Final = frozenset({"names", "saved_in_part", "params", "param_names", "initial_lr"})
"""What checkpoints and schedulers write into a group: no options of an optimizer."""


class OtherOptimizer(ValueError):  # noqa: N818  (reads as what is wrong; callers explain it)
    """The state is another optimizer's; the text names both, or the parameter that tells."""


def kind_of(optimizer: Optimizer) -> str:
    """`torch.optim.AdamW`, or `package.module.Name`."""
    kind = type(optimizer)
    module = "torch.optim" if kind.__module__.startswith("torch.optim.") else kind.__module__
    return f"{module}.{kind.__qualname__}"


def require_same_kind(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Raises `OtherOptimizer`. The module of a class may have changed, its name may not.

    Checkpoints did not always say the class: there the options of the groups must tell.
    """
    now, before = kind_of(optimizer), saved.get("kind")
    groups = saved["groups"] if "groups" in saved else saved["param_groups"]
    if before is not None and _class(before) != _class(now):
        raise OtherOptimizer(
            f"it was saved with {before}, and this script has {now}; the state of one means "
            f"nothing to the other. Go on with {before}."
        )
    strange = _strange_options(optimizer, groups)
    if strange:
        raise OtherOptimizer(
            f"it was saved with {before or 'another optimizer'}, whose groups have {strange}; this "
            f"script's {now} has {', '.join(sorted(optimizer.defaults))}. Go on with the optimizer "
            "that it was saved with."
        )


def require_same_groups(
    saved: Sequence[Mapping[str, Any]], now: Sequence[Sequence[str]], *, whole: bool
) -> None:
    """Raises `OtherOptimizer` unless parameters are in groups as they were.

    `now`: the names in each group. `whole`: they are all that there are; else, a stage's.
    """
    place = {name: index for index, group in enumerate(saved) for name in group["names"]}
    here = {name: index for index, names in enumerate(now) for name in names}
    in_stages = any(
        "saved_in_part" in group for group in saved
    )  # which leave out what none of them uses
    for name in here:
        if name not in place and not (in_stages and whole):
            raise _changed(f"{name!r} is trained now, and was not when it was saved", saved, now)
    for name in place:
        if name not in here and whole and not in_stages:
            raise _changed(f"{name!r} was trained when it was saved, and is not now", saved, now)
    for one, other in _neighbours([group["names"] for group in saved]):
        if one in here and other in here and here[one] != here[other]:
            raise _changed(f"{one!r} and {other!r} were in one group, and are in two", saved, now)
    for one, other in _neighbours([[name for name in names if name in place] for names in now]):
        before, after = saved[place[one]], saved[place[other]]
        # Stages save their groups apart: one group of the whole model is in several of them.
        apart = before.get("saved_in_part") != after.get("saved_in_part")
        if before is not after and not apart:
            raise _changed(f"{one!r} and {other!r} were in two groups, and are in one", saved, now)


def _strange_options(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> str:
    """The options of saved groups that this optimizer does not know, if it lacks some too.

    One that has only more, or only fewer, is the same optimizer of another version of torch.
    """
    known = set(optimizer.defaults).union(*optimizer.param_groups)
    for group in groups:
        strange = set(group) - known - _NOTED
        if strange and set(optimizer.defaults) - set(group):
            return ", ".join(sorted(strange))
        decoupled = optimizer.defaults.get("decoupled_weight_decay")
        if group.get("decoupled_weight_decay", decoupled) != decoupled:
            return f"decoupled_weight_decay={not decoupled}"  # Adam's options are AdamW's
    return ""


def _changed(
    what: str, saved: Sequence[Mapping[str, Any]], now: Sequence[Sequence[str]]
) -> OtherOptimizer:
    before = sum(len(group["names"]) for group in saved)
    return OtherOptimizer(
        f"{what}. Saved were {before} parameters in {len(saved)} group(s); the optimizer has "
        f"{sum(map(len, now))} in {len(now)}. Give it the same parameters in the same groups."
    )


def _neighbours(groups: Sequence[Sequence[str]]) -> Iterator[tuple[str, str]]:
    """Of each group, every parameter with the first."""
    for names in groups:
        for name in names[1:]:
            yield names[0], name


def _class(kind: str) -> str:
    return kind.rpartition(".")[2]

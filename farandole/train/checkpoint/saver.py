"""Puts a model into a checkpoint as one model, however many ranks it is spread over.

A whole model is written by rank 0 as `model-0`. The ranks of a pipeline write what each of them
holds, under the names that it has in the whole model, as `model-0.0`, `model-0.1` and so on. To
read either, parts are merged; so a checkpoint can be loaded under another layout, or none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from farandole.comm import Group
from farandole.sync import Synchronizer
from farandole.train.checkpoint.fitting_model import require_fitting_model
from farandole.train.checkpoint.optimizer_state import (
    merged,
    names_of,
    numbered_state,
    require_fitting_state,
    state_by_name,
)
from farandole.train.checkpoint.same_optimizer import require_same_kind

if TYPE_CHECKING:
    from farandole.layout.pipeline.pipelined import Pipelined

State = tuple[dict[str, Any], dict[str, Any] | None]
"""Of a model and its optimizer, by the names in the whole model."""


class Saver(ABC):
    """For one model of a run. All ranks call everything together."""

    suffix: str = ""
    """Of the parts that this rank writes."""
    optimizer: Optimizer | None

    @abstractmethod
    def state(self) -> State | None:
        """What this rank writes; None: nothing."""

    @abstractmethod
    def check(self, model: Mapping[str, Any], optimizer: Mapping[str, Any] | None) -> None:
        """Raises an error if `load` would. Changes nothing, and waits for nobody."""

    @abstractmethod
    def load(self, model: Mapping[str, Any], optimizer: Mapping[str, Any] | None) -> None:
        """Takes its part of what all have written. All ranks have checked it."""


class WholeSaver(Saver):
    """A whole model on every rank."""

    def __init__(
        self, synchronizer: Synchronizer, optimizer: Optimizer | None, group: Group
    ) -> None:
        self._synchronizer = synchronizer
        self.optimizer = optimizer
        self._group = group

    def state(self) -> State | None:
        model = self._synchronizer.whole_model()  # a collective: also on ranks that do not write
        if self._group.rank != 0:
            return None
        if self.optimizer is None:
            return model, None
        return model, state_by_name(self.optimizer, names_of(self._synchronizer.model))

    def check(self, model: Mapping[str, Any], optimizer: Mapping[str, Any] | None) -> None:
        if self.optimizer is not None and optimizer is not None:
            require_same_kind(self.optimizer, optimizer)
            require_fitting_state(self.optimizer, self._numbered(optimizer))
        require_fitting_model(self._synchronizer.model, model)

    def load(self, model: Mapping[str, Any], optimizer: Mapping[str, Any] | None) -> None:
        self._synchronizer.model.load_state_dict(model)
        if self.optimizer is not None and optimizer is not None:
            self.optimizer.load_state_dict(self._numbered(optimizer))

    def _numbered(self, optimizer: Mapping[str, Any]) -> dict[str, Any]:
        assert self.optimizer is not None
        if "named" not in optimizer:  # as checkpoints had it before there were layouts
            return dict(optimizer)
        names = names_of(self._synchronizer.model)
        return numbered_state(self.optimizer, optimizer, names, whole=True)


class PartSaver(Saver):
    """The stages that a rank of a pipeline holds.

    `names`: for the tensors that this rank holds, by their name here, the name in the whole model.
    `aliases`: further names of tied weights there. `owned`: what is written by ranks in this place
    of a replica. `writes`: whether this rank is the one that does.
    """

    optimizer: Optimizer

    def __init__(
        self,
        synchronizer: Synchronizer,
        optimizer: Optimizer,
        pipelined: Pipelined,
        names: Mapping[str, str],
        aliases: Mapping[str, str],
        owned: set[str],
        *,
        writes: bool,
    ) -> None:
        self.place, self.places = pipelined.pipe.rank, pipelined.pipe.size
        self.suffix = f".{self.place}"
        self._synchronizer = synchronizer
        self.optimizer = optimizer
        self._pipelined = pipelined
        self._names = names
        self._aliases = aliases
        self._owned = owned
        self._writes = writes

    def state(self) -> State | None:
        # Nothing may be in the pipeline: a stage that has applied an update and one that has not
        # would be saved as parts of one model.
        self._pipelined.runner.drain()
        here = self._synchronizer.whole_model()
        return self._part(here) if self._writes and self._owned else None

    def held(self, changed: Mapping[str, Any]) -> State:
        """What ranks in this place write, with some tensors `changed`, by their names here. Waits
        for nobody, where replicas hold the same."""
        return self._part({**self._synchronizer.model.state_dict(), **changed})

    def copied_buffers(self) -> dict[str, torch.Tensor]:
        """Those that are saved, by their names here."""
        state = self._synchronizer.model.state_dict(keep_vars=True)
        return {
            name: value.detach().clone()
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
        }

    def _part(self, here: Mapping[str, Any]) -> State:
        model = {self._names[name]: value for name, value in here.items() if name in self._names}
        for alias, name in self._aliases.items():
            if name in model:
                model[alias] = model[name]
        first = {name: self._aliases.get(name, name) for name in model}
        model = {name: value for name, value in model.items() if first[name] in self._owned}
        optimizer = state_by_name(self.optimizer, self._parameter_names())
        return model, _only(optimizer, self._owned)

    def check(self, model: Mapping[str, Any], optimizer: Mapping[str, Any] | None) -> None:
        if optimizer is not None:
            require_same_kind(self.optimizer, optimizer)
        require_fitting_model(self._synchronizer.model, self._own_part(model))
        if optimizer is None:
            return
        if "named" not in optimizer:
            raise ValueError(
                "it is from before there were layouts. Load it once without a layout, and save it "
                "again."
            )
        require_fitting_state(self.optimizer, self._numbered(optimizer))

    def load(self, model: Mapping[str, Any], optimizer: Mapping[str, Any] | None) -> None:
        self._pipelined.runner.drain()
        self._synchronizer.model.load_state_dict(self._own_part(model))
        self._pipelined.runner.reloaded()
        if optimizer is not None:
            self.optimizer.load_state_dict(self._numbered(optimizer))

    def _own_part(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """Of the whole model, what this rank holds, by its names here."""
        here = self._synchronizer.model.state_dict()
        wanted = {name: self._names[name] for name in here if name in self._names}
        missing = [name for name in wanted.values() if name not in model]
        if missing:
            raise ValueError(f"it has no {missing[0]!r}")
        return {**here, **{name: model[whole] for name, whole in wanted.items()}}

    def _numbered(self, optimizer: Mapping[str, Any]) -> dict[str, Any]:
        return numbered_state(self.optimizer, optimizer, self._parameter_names(), whole=False)

    def _parameter_names(self) -> dict[int, str]:
        bridge: nn.Module = self._synchronizer.model
        return {
            id(parameter): self._names[name]
            for name, parameter in bridge.named_parameters()
            if name in self._names
        }


def merged_parts(parts: Mapping[str, Any], index: int) -> State | None:
    """Model number `index` of a checkpoint, from all its parts; None: there is none."""
    models = _parts(parts, f"model-{index}")
    if not models:
        return None
    model = {name: value for part in models for name, value in part.items()}
    whole = parts.get(f"optimizer-{index}")
    if whole is not None:
        return model, whole
    optimizers = _parts(parts, f"optimizer-{index}")
    return model, merged(optimizers) if optimizers else None


def count_models(parts: Mapping[str, Any]) -> int:
    return len({name.split(".")[0] for name in parts if name.startswith("model-")})


def _parts(parts: Mapping[str, Any], name: str) -> list[Any]:
    return [value for key, value in parts.items() if key == name or key.startswith(f"{name}.")]


def _only(state: dict[str, Any], owned: set[str]) -> dict[str, Any]:
    """Of an optimizer's state by name, what belongs to some names."""
    return {
        **state,
        "named": {name: value for name, value in state["named"].items() if name in owned},
        "groups": [
            {**group, "names": [name for name in group["names"] if name in owned]}
            for group in state["groups"]
        ],
    }

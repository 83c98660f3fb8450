"""What a recording took as it was. It is compared before every step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from farandole.errors import UserError
from farandole.layout.recording.state.code_state import CodeState


class RecordedState:
    """What a recording took as it was, to be compared before every step."""

    def __init__(self, modules: Mapping[str, nn.Module], tensors: Iterable[torch.Tensor]) -> None:
        self._modules, self._tensors = modules, list(tensors)
        self._state = CodeState(modules, self._tensors)
        self._modes = {name: module.training for name, module in modules.items()}
        self._of_the_script: set[str] = set()  # what it has added for itself

    def taken_apart(self) -> None:
        """The model's tensors have been moved and freed; that is no change by the script."""
        self._state = CodeState(self._modules, self._tensors)

    def __deepcopy__(self, memo: dict[int, Any]) -> RecordedState:
        return self  # it is of the model that the script has, not of a copy

    def check(self, *, modes: bool) -> None:
        """Raises `UserError` naming what is no longer what it was. `modes`: also `training`."""
        if not self._state.is_the_same():
            self._refuse_changes()
        for name, module in self._modules.items() if modes else ():
            if module.training is not self._modes[name]:
                raise UserError(
                    f"{name or 'the model'}.training was changed to {module.training} after the "
                    f"model was cut into stages. Steps run in the mode that the model was cut in "
                    f"(call model.train({self._modes[name]})), and predictions in evaluation."
                )

    def _refuse_changes(self) -> None:
        for change in self._state.changes():
            if change.name in self._of_the_script or not self._state.matters(change):
                self._of_the_script.add(change.name)
                continue
            raise UserError(
                f"{change} was changed after the model was cut into stages, and the cut has its "
                f"old value. Let a buffer hold it (self.register_buffer(…), then .fill_()), or "
                f"pass it to forward as an argument, or name layout cuts=… so that the code that "
                f"reads it is in a submodule without a cut inside: that runs as it is."
            )
        if all(module.training is self._modes[name] for name, module in self._modules.items()):
            self._state = CodeState(self._modules, self._tensors)  # equal, or the script's own

"""Which layer of a stage runs now: for the log, for errors, and for the layer where tiles end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from farandole.errors import UserError
from farandole.layout.tiles.core.flow import Flow


class LayerHooks:
    """Follows the layers of a stage by hooks on its modules. `names` are those of the layers.

    `chosen`: the layer at which the tiles end, if there is one; `at_chosen` is given its arguments
    and returns others.
    """

    def __init__(
        self,
        flow: Flow,
        names: Mapping[nn.Module, str],
        chosen: str,
        at_chosen: Callable[[tuple[Any, ...]], Any],
    ) -> None:
        self._flow = flow
        self._chosen = chosen
        self._at_chosen = at_chosen
        self._path: list[str] = []
        for module, name in names.items():
            self._watch(module, name)

    def begin(self) -> None:
        """A forward pass begins. One that has raised before may have left names behind."""
        self._path.clear()

    def _watch(self, module: nn.Module, name: str) -> None:
        def enter(module: nn.Module, args: tuple[Any, ...]) -> Any:
            self._path.append(name)
            self._flow.layer = name
            if module._backward_hooks or module._backward_pre_hooks:
                self._refuse_backward_hooks()
            return self._at_chosen(args) if name == self._chosen else None

        def leave(module: nn.Module, args: Any, result: Any) -> None:
            if self._path:
                self._path.pop()
            self._flow.layer = self._path[-1] if self._path else "the model's own forward"

        if isinstance(module, torch.jit.ScriptModule):  # has no hooks
            return
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)

    def _refuse_backward_hooks(self) -> None:
        if torch.is_grad_enabled():
            raise UserError(
                f"{self._flow.layer}: its backward hook (register_full_backward_hook) would see "
                "the gradient of this worker's tile alone. Write it as a torch.autograd.Function, "
                "whose backward sees all of it, or train this model without tiles."
            )

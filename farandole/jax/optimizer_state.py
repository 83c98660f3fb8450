"""The state of an optax optimizer: what strategies average of it, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import torch

from farandole.comm.buffers import from_buffer
from farandole.errors import UserError
from farandole.jax.trees import Tree, taken_apart


class OptimizerState:
    """Arrays of numbers, such as momentum, are its slots; counters stay each rank's own."""

    def __init__(self) -> None:
        self._tree: Tree | None = None
        self.names: list[str] = []

    def read(self, state: Any) -> dict[str, torch.Tensor]:
        """The slots of the state that a strategy begins with."""
        if state is None:
            return {}
        values, self._tree = taken_apart(state, "state")
        slots = {
            name: from_buffer(value)
            for name, value in zip(self._tree.names, values, strict=True)
            if _is_slot(value)
        }
        self.names = list(slots)
        return slots

    def take(self, state: Any) -> list[Any]:
        """The slots of this state, in the order of `names`."""
        if state is None and self._tree is None:
            return []
        values, tree = taken_apart(state, "state")
        if self._tree is None or tree.leaves != self._tree.leaves:
            raise UserError(
                "step(params, state) wants the optimizer's state as it was given to "
                f"fd.jax.average: {_shown(self._tree)}, and not {_shown(tree)}."
            )
        return [value for value in values if _is_slot(value)]

    def put(self, state: Any, slots: Sequence[Any]) -> Any:
        """The state with other slots."""
        values, tree = taken_apart(state, "state")
        rest = iter(slots)
        return tree.rebuild([next(rest) if _is_slot(value) else value for value in values])


def _is_slot(value: Any) -> bool:
    return value.ndim > 0 and bool(jnp.issubdtype(value.dtype, jnp.floating))


def _shown(tree: Tree | None) -> str:
    if tree is None:
        return "none"
    return ", ".join(f"{name} {shape}" for name, shape, _ in tree.leaves[:3]) + ", …"

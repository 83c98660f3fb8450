"""Operations that run while a forward is traced, because nothing in them depends on the input."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from farandole.layout.recording.reasons import CannotRecordError


class EagerOperations(TorchDispatchMode):
    """Sees the operations that run while tracing, on tensors that do not come from the input.

    `read`: the tensors from outside whose values the recording now depends on.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._weights = {id(each): name for name, each in model.named_parameters()}
        self.read: dict[int, torch.Tensor] = {}
        self._made: list[torch.Tensor] = []  # kept, so that no other gets its memory
        self._own: set[int] = set()  # where they lie

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise CannotRecordError(f"it draws a random number outside of a layer ({func})")
        given = _tensors((args, kwargs))
        outside = [each for each in given if not self._is_own(each)]
        if func._schema.is_mutable and outside:
            for index, argument in enumerate(func._schema.arguments):
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                written = argument.alias_info is not None and argument.alias_info.is_write
                if written and not all(map(self._is_own, _tensors(value))):
                    raise CannotRecordError(f"it writes to a tensor from outside ({func})")
        for each in outside:
            if id(each) in self._weights:  # found by named_parameters(), say
                raise CannotRecordError(
                    f"it computes with the weight {self._weights[id(each)]!r} by another way than "
                    f"as an attribute ({func}), and the recording would have its value of now"
                )
        self.read |= {id(each): each for each in outside}
        result = func(*args, **kwargs)
        # A view of a tensor from outside is not the code's own: a write to it would reach the
        # outside.
        inherited = {each.untyped_storage()._cdata for each in outside}
        for each in _tensors(result):
            if each.untyped_storage()._cdata not in inherited:
                self._made.append(each)
                self._own.add(each.untyped_storage()._cdata)
        return result

    def _is_own(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._own


def _tensors(value: Any) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

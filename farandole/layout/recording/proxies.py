"""What stands for a tensor while a forward is traced."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from farandole.layout.recording.reasons import CannotRecordError

_IN_PLACE = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")


class TensorProxy(fx.Proxy):
    """Also records `x += y` and `x[i] = y` as what they are: others that hold `x` see them."""

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})

    def __deepcopy__(self, memo: dict[Any, Any]) -> fx.Proxy:
        # It would be a copy of the whole recording.
        raise CannotRecordError("its code copies a tensor by copy.deepcopy; .clone() can be traced")

    __copy__ = __reduce_ex__ = __deepcopy__  # type: ignore[assignment]


def _add_in_place_operators() -> None:
    for name in _IN_PLACE:
        function = getattr(operator, f"i{name}")

        def in_place(self: TensorProxy, other: Any, function: Any = function) -> fx.Proxy:
            return self.tracer.create_proxy("call_function", function, (self, other), {})

        setattr(TensorProxy, f"__i{name}__", in_place)


_add_in_place_operators()


class StateProxy(TensorProxy):
    """A buffer or parameter of the model. Its shape is the same for all batches."""

    def __init__(self, node: fx.Node, tracer: fx.Tracer, tensor: torch.Tensor) -> None:
        super().__init__(node, tracer)
        self._tensor = tensor

    @property
    def shape(self) -> torch.Size:
        return self._tensor.shape

    @property
    def ndim(self) -> int:
        return self._tensor.ndim

    def size(self, dim: int | None = None) -> Any:
        return self._tensor.size() if dim is None else self._tensor.size(dim)

    def dim(self) -> int:
        return self._tensor.dim()

    def numel(self) -> int:
        return self._tensor.numel()

    nelement = numel

    def __len__(self) -> int:
        return len(self._tensor)

    def __iter__(self) -> Iterator[Any]:
        rows: Any = self
        return iter([rows[index] for index in range(len(self._tensor))])

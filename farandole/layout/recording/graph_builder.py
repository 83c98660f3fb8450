"""The graph of a recording, and what its nodes stand for while the model's code runs.

Tensors carry the node that made them; numbers become symbols (see `symbols`). So an argument of a
recorded call is the operation that found it, not its value.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from farandole.layout.recording.reasons import CannotRecordError, caller
from farandole.layout.recording.replay import Unsent, require
from farandole.layout.recording.symbols import Symbol, plain, symbol

_PLAIN = (bool, int, float, complex, str, type(None), type(Ellipsis), range)
_PLAIN_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_TAG = "_farandole_recorded"


class GraphBuilder:
    """Makes the nodes of one recording. `stack`: the modules whose code runs now."""

    def __init__(self, model: nn.Module) -> None:
        self.graph = fx.Graph()
        self.attributes: dict[str, Any] = {"training": model.training}
        self.stack: list[nn.Module] = []
        self._layers = {module: name for name, module in model.named_modules()}
        tensors = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        self.names = {id(tensor): name for name, tensor in reversed(tensors)}
        self._constants: list[torch.Tensor] = []  # kept, so that no other gets their identity

    def operation(self, function: Callable[..., Any], *arguments: Any) -> fx.Node:
        return self.node("call_function", function, self.argument(arguments), {})

    def require(self, node: fx.Node, value: Any, what: str = "") -> None:
        self.node("call_function", require, (node, value, caller() + what), {})

    def node(self, op: str, target: Any, args: Any, kwargs: Any) -> fx.Node:
        node = self.graph.create_node(op, target, args, kwargs)
        node.meta["stack"] = tuple(self.stack)
        node.meta["module"] = self._layers[self.stack[-1]] if self.stack else ""
        node.meta["differentiable"] = False
        return node

    def attribute(self, name: str, value: Any) -> fx.Node:
        self.attributes[name] = value
        return self.node("get_attr", name, (), {})

    def argument(self, value: Any) -> Any:
        """As a graph has it: a node for what was computed, and plain values as they are."""
        if isinstance(value, Symbol):
            return value.recorded
        if isinstance(value, torch.Tensor):
            return self.node_of(value)
        if type(value) in _PLAIN or isinstance(value, _PLAIN_OF_TORCH):
            return value
        if isinstance(value, slice):
            return slice(*map(self.argument, (value.start, value.stop, value.step)))
        if type(value) in (tuple, torch.Size):
            return tuple(map(self.argument, value))
        if type(value) is list:
            return [self.argument(each) for each in value]
        if type(value) is dict:
            return {key: self.argument(each) for key, each in value.items()}
        raise CannotRecordError(f"a {type(value).__name__} is an argument in its code")

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        # A tag names its builder, since a tensor that outlives a recording (a cache, say) comes
        # with the tag of that one.
        owner, node = getattr(tensor, _TAG, (None, None))
        if owner is self and node is not None:
            return node  # type: ignore[no-any-return]
        if id(tensor) not in self.names:  # in a plain attribute, or made behind torch's back
            if isinstance(tensor, nn.Parameter):
                raise CannotRecordError("its code uses a parameter that is none of the model's")
            self.names[id(tensor)] = f"_constant{len(self._constants)}"
            self._constants.append(tensor)
        return self.attribute(self.names[id(tensor)], tensor)

    def result(self, result: Any, node: fx.Node) -> Any:
        """The same, known to come from `node`; numbers become symbols."""
        if isinstance(result, torch.Tensor):
            node.meta["differentiable"] = result.requires_grad
            # A write to a buffer returns the buffer itself. It stays a look-up by name, so that
            # `cut_graph` sees all uses of one buffer as such.
            if id(result) not in self.names:
                setattr(result, _TAG, (self, node))
            return result
        if isinstance(result, (tuple, list)):
            if type(result) in (tuple, list):  # as many as this: the code may count on it
                self.require(self.node("call_function", len, (node,), {}), len(result))
            self._results(enumerate(result), node)
            return result
        if isinstance(result, Mapping):
            self._results(result.items(), node)
            return result
        if result is None:
            return None
        if type(result) in _PLAIN or isinstance(result, _PLAIN_OF_TORCH):
            return symbol(result, node, self)
        raise CannotRecordError(f"its code gets a {type(result).__name__} from torch")

    def _results(self, items: Any, node: fx.Node) -> None:
        for key, each in items:
            if each is None:
                continue
            inner = self.node("call_function", operator.getitem, (node, key), {})
            made = self.result(each, inner)
            node.meta["differentiable"] |= inner.meta["differentiable"]
            # A tuple or a record from torch cannot hold a symbol. The code reads the plain number,
            # so the recording is right for this number only, and a check is recorded.
            if isinstance(made, Symbol):  # it cannot take the number's place in the nest
                made.fixed()

    def sizes_of(self, name: str, tensor: torch.Tensor, axis: Any = None) -> Any:
        node = self.node_of(tensor)
        sizes = tuple(tensor.shape)
        if node.op == "get_attr":  # a weight's, which are the same for all batches
            if name in ("numel", "nelement"):
                return tensor.numel()
            if name == "__len__":
                return len(tensor)
            return tensor.shape if axis is None else sizes[axis]
        if name in ("numel", "nelement"):
            return symbol(tensor.numel(), self.operation(torch.numel, tensor), self)
        if name == "__len__":  # Python wants a plain number
            length = self._size(node, 0, sizes)
            self.require(length.recorded, length.value, ": len(x), where x.shape[0] may do")
            return sizes[0]
        if axis is not None:
            return self._size(node, operator.index(axis), sizes)
        return torch.Size([self._size(node, each, sizes) for each in range(len(sizes))])

    def _size(self, node: fx.Node, axis: int, sizes: Sequence[int]) -> Any:
        return symbol(sizes[axis], self.node("call_method", "size", (node, axis), {}), self)


def values_of(value: Any) -> Any:
    """The same with the sample's numbers in place of symbols."""
    if isinstance(value, (tuple, list)) and type(value) in (tuple, torch.Size, list):
        made = [values_of(each) for each in value]
        return tuple(made) if type(value) is not list else made
    if type(value) is dict:
        return {key: values_of(each) for key, each in value.items()}
    if isinstance(value, slice):
        return slice(*map(plain, (value.start, value.stop, value.step)))
    return plain(value)


def is_computed(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, Symbol))


def constant_part(leaf: Any) -> tuple[Any] | None:
    if is_computed(leaf):
        return None
    return (leaf if type(leaf) in _PLAIN else Unsent(type(leaf).__name__),)

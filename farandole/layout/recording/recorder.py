"""A model's forward, recorded while it runs on a sample.

The code of the model runs as it is, on real tensors, and every call of a torch function is written
down: with the operations that found its arguments, not their values. So it may do whatever Python
can, for the sample: unpack shapes, assert, build masks, branch on options. What it does with sizes
is recorded too (see `symbols`), so that other batches may have others.

A recording is only right if the code does the same every time. So these fail:

- a branch, or a number, that depends on the values of tensors;
- `no_grad`, `autocast` or the like inside of the code, for what is recorded runs without them, and
  code that asks for them;
- arguments that are neither tensors nor plain values, attributes that the code changes, hooks of
  modules, and writes to parameters or to tensors that are no buffers.

An `autograd.Function` is recorded as one operation, with its own backward. Writes to buffers are
recorded like any other operation in place.

A submodule in which one of these happens stays whole and runs as it is. Only if it is the model's
own forward there is nothing to cut. Layers of `torch.nn` stay whole, unless they hold a list of
blocks, as `nn.TransformerEncoder` does.
"""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from farandole.layout.arguments import Arguments
from farandole.layout.recording.aliases import writes_in_place
from farandole.layout.recording.custom_functions import (
    CustomFunction,
    custom_functions_seen,
    is_under_transform,
)
from farandole.layout.recording.cut_graph import Recording
from farandole.layout.recording.reasons import CannotRecordError, caller, short
from farandole.layout.recording.replay import (
    Output,
    Unsent,
    applied,
    checked,
    rebuilt,
    require,
    signature_of,
)
from farandole.layout.recording.state.code_state import CodeState
from farandole.layout.recording.surroundings import (
    as_if_compiling,
    drawn_elsewhere,
    forget,
    has_hooks,
    questions_refused,
    recall,
    surroundings,
)
from farandole.layout.recording.symbols import Symbol, plain, symbol

_SAME_FOR_ALL_BATCHES = {
    *("dtype", "device", "layout", "ndim", "dim", "requires_grad", "is_leaf", "grad_fn", "grad"),
    *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mps", "is_xpu"),
    *("is_floating_point", "is_complex", "is_signed", "element_size", "itemsize", "get_device"),
    *("is_inference", "is_conj", "is_neg", "names", "_is_view", "__hash__"),
    *("__repr__", "__str__", "__format__"),
}
"""What is asked of a tensor, and follows from what the sample says about all batches."""
_BY_VALUE = {
    *("item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "data_ptr", "__array__"),
    *("__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__"),
    *("__deepcopy__", "__reduce_ex__", "__dlpack__", "storage", "untyped_storage"),
}
_PLAIN = (bool, int, float, complex, str, type(None), type(Ellipsis), range)
_PLAIN_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_TAG = "_farandole_recorded"


class Recorder(TorchFunctionMode):
    """One recording of a model, in the mode (training or evaluation) that it is in.

    `whole`: submodules that are known to stay whole, and why. It grows.
    """

    def __init__(self, model: nn.Module, cuts: Sequence[str], whole: dict[nn.Module, str]) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.attributes: dict[str, Any] = {"training": model.training}
        self.starts: dict[nn.Module, fx.Node] = {}
        self.whole = whole
        self._model = model
        self._cuts = cuts
        self._modules = {module: name for name, module in model.named_modules()}
        tensors = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        self._names = {id(tensor): name for name, tensor in reversed(tensors)}
        self._weights = {_place(weight) for weight in model.parameters()}
        self.opened: dict[str, nn.Module] = {}
        self._thread = threading.get_ident()
        self._constants: list[torch.Tensor] = []  # kept, so that no other gets their identity
        self._stack: list[nn.Module] = []
        self._compiled: set[nn.Module] = set()
        self._paused = False
        self._around = surroundings()
        self._drawn = drawn_elsewhere()

    def record(self, sample: Arguments) -> Recording:
        positional, named = self._placeholders(sample)
        seen = custom_functions_seen(self._is_ours, self._custom_function)
        kept = saved_tensors_hooks(forget, recall)
        asked = questions_refused(lambda: not self._paused)
        with as_if_compiling(), self._watching_modules(), asked, seen, kept, self:
            output = self._model(*positional, **named)
        leaves, spec = pytree.tree_flatten(output, is_leaf=is_no_nest)
        found = [self._argument(leaf) for leaf in leaves if _is_computed(leaf)]
        if spec.is_leaf() and found:
            self.graph.output(found[0])
        else:
            how = self._attribute("_output", Output(spec, tuple(map(_constant_part, leaves))))
            self.graph.output(self._node("call_function", rebuilt, (how, found), {}))
        return Recording(self.graph, self.attributes, self.starts, self.whole, self.opened, [])

    def _placeholders(self, sample: Arguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The model's arguments: copies, for its code may change them."""
        positional = self.graph.placeholder("*args")
        named = self.graph.placeholder("**kwargs")
        signature = signature_of(sample)
        how = self._attribute("_sample", signature)
        row = self._node("call_function", checked, (positional, named, how), {})
        entering: list[Any] = []
        for index, leaf in enumerate(signature.flat(sample)):
            if isinstance(leaf, torch.Tensor):
                leaf = leaf.detach().clone()
            if isinstance(leaf, torch.Tensor) or type(leaf) in (int, float):
                node = self._node("call_function", operator.getitem, (row, index), {})
                leaf = self._result(leaf, node)
            entering.append(leaf)
        result: tuple[tuple[Any, ...], dict[str, Any]]
        result = pytree.tree_unflatten(entering, signature.spec)
        return result

    # Modules

    @contextmanager
    def _watching_modules(self) -> Iterator[None]:
        """Inside, calls of the model's modules come here: of these objects only, not of their
        classes, for other threads may be at work with other models."""
        compiled = {module: vars(module).get("_compiled_call_impl") for module in self._modules}
        self._compiled = {module for module, known in compiled.items() if known is not None}
        try:
            for module in self._modules:
                run = partial(self._call, module, module._call_impl)
                vars(module)["_compiled_call_impl"] = run
            yield
        finally:
            for module, known in compiled.items():
                vars(module).pop("_compiled_call_impl", None)
                if known is not None:
                    vars(module)["_compiled_call_impl"] = known

    def _call(self, module: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._paused:
            return run(*args, **kwargs)
        self._check_draws()
        before = next(iter(reversed(self.graph.nodes)))
        if module is self._model:
            result = self._opened(module, run, args, kwargs)
        elif self._stays_whole(module):
            result = self._closed(module, run, args, kwargs)
        else:
            try:
                result = self._opened(module, run, args, kwargs)
            except Exception as error:
                self.whole[module] = short(error)
                self._take_back(before)
                result = self._closed(module, run, args, kwargs)
        self.starts.setdefault(module, before.next)
        return result

    def _stays_whole(self, module: nn.Module) -> bool:
        if module in self.whole or module in self._compiled:
            return True
        if self._cuts:  # no more than needed: what is not opened cannot be recorded wrongly
            name = self._modules[module]
            return not any(cut.startswith(f"{name}.") for cut in self._cuts)
        layer = type(module).__module__.startswith("torch.")
        holds_blocks = any(isinstance(each, nn.ModuleList) for each in module.modules())
        return layer and not isinstance(module, nn.Sequential) and not holds_blocks

    def _opened(
        self,
        module: nn.Module,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Records what is inside of a module."""
        if has_hooks(module):
            raise CannotRecordError("it has hooks, and they would run only while recording")
        name = self._modules[module]
        state, opened = CodeState({"self": module}), dict(self.opened)
        self.opened[name] = module
        self._stack.append(module)
        try:
            result = run(*args, **kwargs)
            for change in state.changes():
                raise CannotRecordError(f"its forward changes {change}")
            self._check_draws()
        except Exception:
            self.opened = opened
            state.put_back()
            raise
        finally:
            self._stack.pop()
        return result

    def _closed(
        self,
        module: nn.Module,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Records a call of a module as one operation."""
        name = self._modules[module]
        self.attributes[name] = module
        self._checksurroundings()
        node = self._node("call_module", name, self._argument(args), self._argument(kwargs))
        node.meta["module"] = name
        self._paused = True
        try:
            result = run(*_values(args), **_values(kwargs))
        finally:
            self._paused = False
        self._drawn = drawn_elsewhere()  # it may: it will draw again whenever it runs
        return self._result(result, node)

    def _take_back(self, before: fx.Node) -> None:
        nodes = list(self.graph.nodes)
        gone = nodes[nodes.index(before) + 1 :]
        for node in reversed(gone):
            self.graph.erase_node(node)
        self.starts = {part: node for part, node in self.starts.items() if node not in gone}

    # Functions

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name, reads = _name_of(func)
        if self._paused or name in _SAME_FOR_ALL_BATCHES or name.startswith("_set_"):
            return func(*args, **kwargs)
        if name in _BY_VALUE:
            raise CannotRecordError(f"its code depends on the values of a tensor ({name})")
        if name in ("shape", "size", "numel", "nelement", "__len__"):
            return self._sizes(name, *args, *kwargs.values())
        if name == "__iter__":
            return iter(self._called(torch.unbind, "unbind", False, args, kwargs))
        return self._called(func, name, reads, args, kwargs)

    def _called(
        self, func: Any, name: str, reads: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Records a call, and makes it. `reads`: it is the look-up of an attribute."""
        self._checksurroundings()
        positional, named = self._argument(args), self._argument(kwargs)
        if reads:
            node = self._node("call_function", getattr, (positional[0], name), {})
        elif name in ("__getitem__", "__setitem__"):
            node = self._node("call_function", getattr(operator, name[2:-2]), positional, named)
        elif getattr(torch.Tensor, name, None) is func and isinstance(args[0], torch.Tensor):
            node = self._node("call_method", name, positional, named)
        elif _can_be_named(func, name):
            node = self._node("call_function", func, positional, named)
        else:
            how = self._attribute(f"_function{len(self.attributes)}", func)
            node = self._node("call_function", applied, (how, positional, named), {})
        self._check_write(name, node, args, kwargs)
        return self._result(func(*_values(args), **_values(kwargs)), node)

    def _check_write(
        self, name: str, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Before it is done: what recording writes to a weight would stay."""
        written = args[:1] if writes_in_place(node, self.attributes) else ()
        for tensor in pytree.tree_leaves((written, kwargs.get("out"))):
            if not isinstance(tensor, torch.Tensor):
                continue
            if _place(tensor) in self._weights:
                raise CannotRecordError(f"its code writes to a parameter ({name})")
            if self._names.get(id(tensor), "").startswith("_constant"):
                raise CannotRecordError(f"its code writes to a tensor that is no buffer ({name})")

    def _is_ours(self, leaves: list[Any]) -> bool:
        return not self._paused and threading.get_ident() == self._thread

    def _custom_function(
        self, function: CustomFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Records a call of an `autograd.Function` as one operation."""
        self._checksurroundings()
        node = self._node("call_function", function, self._argument(args), self._argument(kwargs))
        self._paused = True
        try:
            result = function(*_values(args), **_values(kwargs))
        finally:
            self._paused = False
        return self._result(result, node)

    def _sizes(self, name: str, tensor: torch.Tensor, axis: Any = None) -> Any:
        node = self._node_of(tensor)
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
        return symbol(sizes[axis], self._node("call_method", "size", (node, axis), {}), self)

    def _checksurroundings(self) -> None:
        if is_under_transform():
            raise CannotRecordError("its code uses vmap or another transform of torch.func")
        if surroundings() != self._around:
            raise CannotRecordError("its code changes autocast, or whether gradients are computed")

    def _check_draws(self) -> None:
        if drawn_elsewhere() != self._drawn:
            raise CannotRecordError("its code draws random numbers of Python or NumPy")

    # Nodes

    def operation(self, function: Callable[..., Any], *arguments: Any) -> fx.Node:
        return self._node("call_function", function, self._argument(arguments), {})

    def require(self, node: fx.Node, value: Any, what: str = "") -> None:
        self._node("call_function", require, (node, value, caller() + what), {})

    def _node(self, op: str, target: Any, args: Any, kwargs: Any) -> fx.Node:
        node = self.graph.create_node(op, target, args, kwargs)
        node.meta["stack"] = tuple(self._stack)
        node.meta["module"] = self._modules[self._stack[-1]] if self._stack else ""
        node.meta["differentiable"] = False
        return node

    def _attribute(self, name: str, value: Any) -> fx.Node:
        self.attributes[name] = value
        return self._node("get_attr", name, (), {})

    def _argument(self, value: Any) -> Any:
        """As a graph has it: a node for what was computed, and plain values as they are."""
        if isinstance(value, Symbol):
            return value.recorded
        if isinstance(value, torch.Tensor):
            return self._node_of(value)
        if type(value) in _PLAIN or isinstance(value, _PLAIN_OF_TORCH):
            return value
        if isinstance(value, slice):
            return slice(*map(self._argument, (value.start, value.stop, value.step)))
        if type(value) in (tuple, torch.Size):
            return tuple(map(self._argument, value))
        if type(value) is list:
            return [self._argument(each) for each in value]
        if type(value) is dict:
            return {key: self._argument(each) for key, each in value.items()}
        raise CannotRecordError(f"a {type(value).__name__} is an argument in its code")

    def _node_of(self, tensor: torch.Tensor) -> fx.Node:
        owner, node = getattr(tensor, _TAG, (None, None))
        if owner is self and node is not None:
            return node  # type: ignore[no-any-return]
        if id(tensor) not in self._names:  # in a plain attribute, or made behind torch's back
            if isinstance(tensor, nn.Parameter):
                raise CannotRecordError("its code uses a parameter that is none of the model's")
            self._names[id(tensor)] = f"_constant{len(self._constants)}"
            self._constants.append(tensor)
        return self._attribute(self._names[id(tensor)], tensor)

    def _result(self, result: Any, node: fx.Node) -> Any:
        """The same, known to come from `node`; numbers become symbols."""
        if isinstance(result, torch.Tensor):
            node.meta["differentiable"] = result.requires_grad
            if id(result) not in self._names:
                setattr(result, _TAG, (self, node))
            return result
        if isinstance(result, (tuple, list)):
            if type(result) in (tuple, list):  # as many as this: the code may count on it
                self.require(self._node("call_function", len, (node,), {}), len(result))
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
            inner = self._node("call_function", operator.getitem, (node, key), {})
            made = self._result(each, inner)
            node.meta["differentiable"] |= inner.meta["differentiable"]
            if isinstance(made, Symbol):  # it cannot take the number's place in the nest
                made.fixed()


def _place(tensor: torch.Tensor) -> int:
    """Where a tensor lies: views of it lie there too."""
    return int(tensor.untyped_storage()._cdata)


def _values(value: Any) -> Any:
    """The same with the sample's numbers in place of symbols."""
    if isinstance(value, (tuple, list)) and type(value) in (tuple, torch.Size, list):
        made = [_values(each) for each in value]
        return tuple(made) if type(value) is not list else made
    if type(value) is dict:
        return {key: _values(each) for key, each in value.items()}
    if isinstance(value, slice):
        return slice(*map(plain, (value.start, value.stop, value.step)))
    return plain(value)


def _name_of(func: Any) -> tuple[str, bool]:
    """A function's name, and whether it is the look-up of a tensor's attribute."""
    name = getattr(func, "__name__", type(func).__name__)
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") or func.__self__.fget.__name__, True
    return name, False


def _can_be_named(func: Any, name: str) -> bool:
    """Whether the code that fx makes of a graph finds it by its name."""
    places = (sys.modules.get(getattr(func, "__module__", None) or ""), torch, torch.nn.functional)
    return any(getattr(place, name, None) is func for place in places if place is not None)


def is_no_nest(value: Any) -> bool:
    return not isinstance(value, (tuple, list, Mapping))


def _is_computed(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, Symbol))


def _constant_part(leaf: Any) -> tuple[Any] | None:
    if _is_computed(leaf):
        return None
    return (leaf if type(leaf) in _PLAIN else Unsent(type(leaf).__name__),)

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
from farandole.layout.recording.graph_builder import (
    GraphBuilder,
    constant_part,
    is_computed,
    values_of,
)
from farandole.layout.recording.reasons import CannotRecordError, short
from farandole.layout.recording.replay import (
    Output,
    applied,
    checked,
    rebuilt,
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
from farandole.layout.recording.tensor_functions import (
    BY_VALUE,
    SAME_FOR_ALL_BATCHES,
    can_be_named,
    name_of,
)


class Recorder(TorchFunctionMode):
    """One recording of a model, in the mode (training or evaluation) that it is in.

    `whole`: submodules that are known to stay whole, and why. It grows.
    """

    def __init__(self, model: nn.Module, cuts: Sequence[str], whole: dict[nn.Module, str]) -> None:
        super().__init__()
        self._builder = GraphBuilder(model)
        self.starts: dict[nn.Module, fx.Node] = {}
        self.whole = whole
        self._model = model
        self._cuts = cuts
        self._modules = {module: name for name, module in model.named_modules()}
        self._weights = {_place(weight) for weight in model.parameters()}
        self.opened: dict[str, nn.Module] = {}
        self._thread = threading.get_ident()
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
        found = [self._builder.argument(leaf) for leaf in leaves if is_computed(leaf)]
        if spec.is_leaf() and found:
            self._builder.graph.output(found[0])
        else:
            how = self._builder.attribute(
                "_output", Output(spec, tuple(map(constant_part, leaves)))
            )
            self._builder.graph.output(
                self._builder.node("call_function", rebuilt, (how, found), {})
            )
        return Recording(
            self._builder.graph, self._builder.attributes, self.starts, self.whole, self.opened, []
        )

    def _placeholders(self, sample: Arguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The model's arguments: copies, for its code may change them."""
        positional = self._builder.graph.placeholder("*args")
        named = self._builder.graph.placeholder("**kwargs")
        signature = signature_of(sample)
        how = self._builder.attribute("_sample", signature)
        row = self._builder.node("call_function", checked, (positional, named, how), {})
        entering: list[Any] = []
        for index, leaf in enumerate(signature.flat(sample)):
            if isinstance(leaf, torch.Tensor):
                leaf = leaf.detach().clone()
            if isinstance(leaf, torch.Tensor) or type(leaf) in (int, float):
                node = self._builder.node("call_function", operator.getitem, (row, index), {})
                leaf = self._builder.result(leaf, node)
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
                # `nn.Module.__call__` looks at this attribute first. torch.compile uses the same
                # way in.
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
        before = next(iter(reversed(self._builder.graph.nodes)))
        if module is self._model:
            result = self._opened(module, run, args, kwargs)
        elif self._stays_whole(module):
            result = self._closed(module, run, args, kwargs)
        else:
            try:
                result = self._opened(module, run, args, kwargs)
            except Exception as error:
                self.whole[module] = short(error)
                # The attempt leaves nothing behind: its nodes are erased here, and `_opened` has
                # put attributes back. Tensors that it has made are unreachable, so their erased
                # nodes are never asked for.
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
        self._builder.stack.append(module)
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
            self._builder.stack.pop()
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
        self._builder.attributes[name] = module
        self._check_surroundings()
        node = self._builder.node(
            "call_module", name, self._builder.argument(args), self._builder.argument(kwargs)
        )
        node.meta["module"] = name
        self._paused = True
        try:
            result = run(*values_of(args), **values_of(kwargs))
        finally:
            self._paused = False
        self._drawn = drawn_elsewhere()  # it may: it will draw again whenever it runs
        return self._builder.result(result, node)

    def _take_back(self, before: fx.Node) -> None:
        nodes = list(self._builder.graph.nodes)
        gone = nodes[nodes.index(before) + 1 :]
        for node in reversed(gone):
            self._builder.graph.erase_node(node)
        self.starts = {part: node for part, node in self.starts.items() if node not in gone}

    # Functions

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name, reads = name_of(func)
        # What is inside a submodule that stays whole is not recorded: it runs as it is in every
        # step, so it may do anything.
        if self._paused or name in SAME_FOR_ALL_BATCHES or name.startswith("_set_"):
            return func(*args, **kwargs)
        if name in BY_VALUE:
            raise CannotRecordError(f"its code depends on the values of a tensor ({name})")
        if name in ("shape", "size", "numel", "nelement", "__len__"):
            return self._builder.sizes_of(name, *args, *kwargs.values())
        if name == "__iter__":
            return iter(self._called(torch.unbind, "unbind", False, args, kwargs))
        return self._called(func, name, reads, args, kwargs)

    def _called(
        self, func: Any, name: str, reads: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Records a call, and makes it. `reads`: it is the look-up of an attribute."""
        self._check_surroundings()
        positional, named = self._builder.argument(args), self._builder.argument(kwargs)
        if reads:
            node = self._builder.node("call_function", getattr, (positional[0], name), {})
        elif name in ("__getitem__", "__setitem__"):
            node = self._builder.node(
                "call_function", getattr(operator, name[2:-2]), positional, named
            )
        elif getattr(torch.Tensor, name, None) is func and isinstance(args[0], torch.Tensor):
            node = self._builder.node("call_method", name, positional, named)
        elif can_be_named(func, name):
            node = self._builder.node("call_function", func, positional, named)
        else:
            how = self._builder.attribute(f"_function{len(self._builder.attributes)}", func)
            node = self._builder.node("call_function", applied, (how, positional, named), {})
        self._check_write(name, node, args, kwargs)
        return self._builder.result(func(*values_of(args), **values_of(kwargs)), node)

    def _check_write(
        self, name: str, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Before it is done: what recording writes to a weight would stay."""
        written = args[:1] if writes_in_place(node, self._builder.attributes) else ()
        for tensor in pytree.tree_leaves((written, kwargs.get("out"))):
            if not isinstance(tensor, torch.Tensor):
                continue
            if _place(tensor) in self._weights:
                raise CannotRecordError(f"its code writes to a parameter ({name})")
            if self._builder.names.get(id(tensor), "").startswith("_constant"):
                raise CannotRecordError(f"its code writes to a tensor that is no buffer ({name})")

    def _is_ours(self, leaves: list[Any]) -> bool:
        return not self._paused and threading.get_ident() == self._thread

    def _custom_function(
        self, function: CustomFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Records a call of an `autograd.Function` as one operation."""
        self._check_surroundings()
        node = self._builder.node(
            "call_function", function, self._builder.argument(args), self._builder.argument(kwargs)
        )
        self._paused = True
        try:
            result = function(*values_of(args), **values_of(kwargs))
        finally:
            self._paused = False
        return self._builder.result(result, node)

    def _check_surroundings(self) -> None:
        if is_under_transform():
            raise CannotRecordError("its code uses vmap or another transform of torch.func")
        if surroundings() != self._around:
            raise CannotRecordError("its code changes autocast, or whether gradients are computed")

    def _check_draws(self) -> None:
        if drawn_elsewhere() != self._drawn:
            raise CannotRecordError("its code draws random numbers of Python or NumPy")


def _place(tensor: torch.Tensor) -> int:
    """Where a tensor lies: views of it lie there too."""
    return int(tensor.untyped_storage()._cdata)


def is_no_nest(value: Any) -> bool:
    return not isinstance(value, (tuple, list, Mapping))

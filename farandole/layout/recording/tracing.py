"""Blocks of a model that is no sequence: its forward is recorded with torch.fx, then cut.

A recording is only right if the code does the same every time. What would go wrong without a word
is taken care of here:

- `F.dropout(x, p, self.training)` would be recorded with today's mode. While a module is recorded,
  its `training` stands for a look-up, so that `train()` and `eval()` of the block still decide.
- Buffers and parameters stand for look-ups too. Operations on them, in place ones included, are
  recorded, and do not run while tracing.
- An `autograd.Function` is recorded as one operation, with its own backward.
- What runs all the same while tracing, because nothing in it depends on the input, is seen by a
  dispatch mode: random draws and writes are failures. So are attributes that the code changes,
  hooks of modules, and code that changes or asks whether gradients are computed.
- A submodule that cannot be recorded (its code does one of these, or depends on values, or on the
  mode) stays whole and runs as it is. Only if that is the model itself there is nothing to cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx, nn

from farandole.errors import UserError
from farandole.layout.recording.aliases import written_roots
from farandole.layout.recording.custom_functions import CustomFunction, custom_functions_seen
from farandole.layout.recording.cut_graph import Recording, cut_recording
from farandole.layout.recording.eager_operations import EagerOperations
from farandole.layout.recording.proxies import StateProxy, TensorProxy
from farandole.layout.recording.reasons import CannotRecordError, short
from farandole.layout.recording.state.code_state import CodeState
from farandole.layout.recording.state.random_states import RandomStates
from farandole.layout.recording.state.restored import process_lock
from farandole.layout.recording.surroundings import (
    has_hooks,
    questions_refused,
    surroundings,
)

# They do not look at what their arguments are, so fx alone cannot record them.
_CREATORS = ("arange", "empty", "full", "ones", "rand", "randn", "zeros")


def traced(model: nn.Module, cuts: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """Name and module of each block. The parameters keep the names they have in the model."""
    return cut_recording(_record(model, cuts), cuts, model)


def is_traced(block: nn.Module) -> bool:
    """Whether a block is the first of a model that was traced here: it takes one argument."""
    if not isinstance(block, fx.GraphModule):
        return False
    inputs = [node.target for node in block.graph.nodes if node.op == "placeholder"]
    return inputs == ["value"]


class _OneArgument(nn.Module):
    """Calls the model as a pipeline does: whatever else its forward takes has its default."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, value: Any) -> Any:
        return self.model(value)


def _record(model: nn.Module, cuts: Sequence[str]) -> Recording:
    recorder = _Recorder(model, cuts)
    root = _OneArgument(model)
    try:
        with process_lock(), recorder.at_work():
            graph = recorder.trace(root)
    except Exception as error:
        raise UserError(
            f"{type(model).__name__} cannot be cut into stages, for its forward cannot be traced: "
            f"{short(error)}. Put this code into a submodule: one that cannot be traced stays "
            f"whole and runs as it is. Or pass an nn.Sequential, a list of blocks, or "
            f"run.trainer(…, sample=x), with which the model is recorded while it runs."
        ) from error
    attributes = {}
    for node in graph.nodes:
        if node.op in ("call_module", "get_attr"):
            name = str(node.target)
            found: Any = root
            for part in name.split("."):
                found = getattr(found, part)
            node.target = name.removeprefix("model.")
            attributes[node.target] = found
    return Recording(
        graph,
        attributes,
        recorder.starts,
        recorder.whole,
        {name: module for module, name in recorder.opened.items()},
        list(recorder.eager.read.values()),
    )


class _Recorder(fx.Tracer):
    def __init__(self, model: nn.Module, cuts: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.cuts = cuts
        self.starts: dict[nn.Module, fx.Node] = {}
        self.whole: dict[nn.Module, str] = {}
        self.opened: dict[nn.Module, str] = {}
        self.eager = EagerOperations(model)
        self._around = surroundings()
        tensors = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        self._weights = {f"model.{name}" for name, _ in model.named_parameters()}
        self._names = {id(tensor): f"model.{name}" for name, tensor in reversed(tensors)}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if m is self.model:
            return False
        if self.cuts:  # no more than needed: what is not opened cannot be recorded wrongly
            name = module_qualified_name.removeprefix("model.")
            return not any(cut.startswith(f"{name}.") for cut in self.cuts)
        return super().is_leaf_module(m, module_qualified_name)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        # Without the cache: it may hold nodes that `_open` has taken back.
        if id(attr_val) not in self._names or not isinstance(attr_val, torch.Tensor):
            return attr_val
        return self.create_proxy(
            "get_attr",
            self._names[id(attr_val)],
            (),
            {},
            proxy_factory_fn=lambda node: StateProxy(node, self, attr_val),
        )

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return TensorProxy(node, self)

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        if kind.startswith("call_") and surroundings() != self._around:
            raise CannotRecordError(
                "its code changes autocast, or whether gradients are computed (no_grad)"
            )
        node = super().create_node(kind, *args, **kwargs)
        for root in written_roots(node, {}):
            if root.op == "get_attr" and str(root.target) in self._weights:
                raise CannotRecordError(f"its code writes to a parameter ({root.target})")
        return node

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        name = self.path_of_module(m)
        before = next(iter(reversed(self.graph.nodes)))
        whole = m in self.whole or self.is_leaf_module(m, name)
        if not whole:
            result = self._open(m, name, lambda: forward(*args, **kwargs), before)
        if whole or m in self.whole:
            result = self.create_proxy("call_module", name, args, kwargs)
        self.starts.setdefault(m, before.next)
        return result

    def _open(self, m: nn.Module, name: str, run: Callable[[], Any], before: fx.Node) -> Any:
        """Records the inside of a module, or notes why that cannot be done."""
        short_name = name.removeprefix("model").removeprefix(".")
        mode, drawn, opened = m.training, RandomStates(), dict(self.opened)
        state = CodeState({"self": m})
        self.opened[m] = short_name
        try:
            if has_hooks(m):
                raise CannotRecordError("it has hooks, and they would run only while tracing")
            # Code that branches on it fails here, since a proxy has no truth value, and the module
            # stays whole. Code that passes it on records the look-up.
            m.training = self.create_proxy("get_attr", f"{name}.training", (), {})  # type: ignore[assignment]
            try:
                result = run()
            finally:
                m.training = mode
            if RandomStates() != drawn:
                raise CannotRecordError("it draws a random number outside of a layer")
            for change in state.changes():
                raise CannotRecordError(f"its forward changes {change}")
            return result
        except Exception as error:
            state.put_back()
            drawn.put_back()
            if m is self.model:
                raise
            self.whole[m] = short(error)
            self.opened = opened
            nodes = list(self.graph.nodes)
            gone = nodes[nodes.index(before) + 1 :]
            # From the last one, because fx refuses to erase a node that still has users.
            for node in reversed(gone):
                self.graph.erase_node(node)
            self.starts = {part: node for part, node in self.starts.items() if node not in gone}
            return None

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Around a trace: what fx alone does not see."""

        def concerns(leaves: list[Any]) -> bool:
            return any(isinstance(leaf, fx.Proxy) and leaf.tracer is self for leaf in leaves)

        def handle(
            function: CustomFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> fx.Proxy:
            return self.create_proxy("call_function", function, args, kwargs)

        with ExitStack() as stack:
            stack.enter_context(self._recording_creators())
            stack.enter_context(custom_functions_seen(concerns, handle))
            stack.enter_context(questions_refused(lambda: True))
            stack.enter_context(self.eager)
            yield

    @contextmanager
    def _recording_creators(self) -> Iterator[None]:
        """Inside, `torch.arange(x.size(1))` and its like are recorded too."""

        def recording(create: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                flat = torch.utils._pytree.tree_leaves((args, kwargs))
                if any(isinstance(value, fx.Proxy) for value in flat):
                    return self.create_proxy("call_function", create, args, kwargs)
                return create(*args, **kwargs)

            return call

        creators = {name: getattr(torch, name) for name in _CREATORS}
        try:
            for name, create in creators.items():
                setattr(torch, name, recording(create))
            yield
        finally:
            for name, create in creators.items():
                setattr(torch, name, create)

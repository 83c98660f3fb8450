"""Blocks of a model that is no sequence: its forward is recorded with torch.fx, then cut.

A recording is only right if the code does the same every time. Three things would go wrong without
a word, so they are taken care of here:

- `F.dropout(x, p, self.training)` would be recorded with today's mode. While a module is recorded,
  its `training` stands for a look-up, so that `train()` and `eval()` of the block still decide.
- A random number drawn outside of a layer would be the same for ever. Drawing one while recording
  counts as a failure.
- A submodule that cannot be recorded (its code depends on values, or on the mode) stays whole and
  runs as it is. Only if that is the model itself there is nothing to cut.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from farandole.errors import UserError
from farandole.layout.cut_graph import Recording, cut_recording
from farandole.layout.left_alone import one_at_a_time
from farandole.layout.reasons import short

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
        with one_at_a_time(), recorder.recording_creators():
            graph = recorder.trace(root)
    except Exception as error:
        raise UserError(
            f"{type(model).__name__} cannot be cut into stages, for its forward cannot be traced: "
            f"{short(error)}. Pass an nn.Sequential, a list of blocks, or a model whose own "
            f"forward does not depend on values; its submodules may."
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
    return Recording(graph, attributes, recorder.starts, recorder.whole)


class _Recorder(fx.Tracer):
    def __init__(self, model: nn.Module, cuts: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.cuts = cuts
        self.starts: dict[nn.Module, fx.Node] = {}
        self.whole: dict[nn.Module, str] = {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if m is self.model:
            return False
        if self.cuts:  # no more than needed: what is not opened cannot be recorded wrongly
            name = module_qualified_name.removeprefix("model.")
            return not any(cut.startswith(f"{name}.") for cut in self.cuts)
        return super().is_leaf_module(m, module_qualified_name)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        # Without the cache: it may hold nodes that `_open` has taken back.
        return super().getattr(attr, attr_val, {})

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
        mode, drawn = m.training, _random_state()
        m.training = self.create_proxy("get_attr", f"{name}.training", (), {})  # type: ignore[assignment]
        try:
            result = run()
            if _random_state() != drawn:
                raise fx.proxy.TraceError("it draws a random number outside of a layer")
            return result
        except Exception as error:
            torch.set_rng_state(torch.frombuffer(bytearray(drawn[0]), dtype=torch.uint8))
            random.setstate(drawn[1])
            if m is self.model:
                raise
            self.whole[m] = short(error)
            nodes = list(self.graph.nodes)
            gone = nodes[nodes.index(before) + 1 :]
            for node in reversed(gone):
                self.graph.erase_node(node)
            self.starts = {part: node for part, node in self.starts.items() if node not in gone}
            return None
        finally:
            m.training = mode

    @contextmanager
    def recording_creators(self) -> Iterator[None]:
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


def _random_state() -> tuple[bytes, Any]:
    return torch.get_rng_state().numpy().tobytes(), random.getstate()

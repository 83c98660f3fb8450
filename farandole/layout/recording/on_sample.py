"""Blocks of a model that is recorded with a sample, once in training and once in evaluation.

Code may look at `self.training`: `dropout_p=self.p if self.training else 0`. So there are two
recordings. Where they differ in a value alone, the block chooses it by its own mode. A submodule
that does something else altogether in evaluation stays whole and runs as it is.

Afterwards the blocks run on the sample, and must give what the model itself gives, in both modes.
Whatever a recording may have missed, nobody trains with it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks

from farandole.errors import UserError
from farandole.layout.arguments import Arguments, call
from farandole.layout.recording.cut_graph import Recording, cut_recording
from farandole.layout.recording.reasons import short
from farandole.layout.recording.recorder import Recorder, is_no_nest
from farandole.layout.recording.replay import by_mode, require
from farandole.layout.recording.state.restored import state_restored, weights_restored
from farandole.layout.recording.surroundings import forget, recall

_SEED = 1  # of the random numbers that are drawn for the sample
_BY_MODE = "its forward does something else in evaluation than in training"


def cut_on_sample(
    model: nn.Module,
    cuts: Sequence[str],
    sample: Arguments,
    device: torch.device,
    precision: torch.dtype | None = None,
) -> list[tuple[str, nn.Module]]:
    """Name and module of each block; the first one takes the model's arguments.

    `device`: where the blocks will run. `precision`: of what autocast lowers then. The model is
    left as it was. Raises `UserError` if its own forward cannot be recorded.
    """
    if "_orig_mod" in dict(model.named_children()):
        raise UserError(
            "the model is what torch.compile returned, and code that is compiled cannot be cut. "
            "Pass the model itself; its submodules may be compiled, with layer.compile()."
        )
    home = next(model.parameters(), torch.empty(0)).device
    sample = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(home), sample)

    def lowered() -> AbstractContextManager[object]:
        return nullcontext() if precision is None else torch.autocast(home.type, precision)

    with state_restored([model]), weights_restored(model), lowered():
        try:
            wanted = {mode: _tried(model, mode, sample) for mode in (True, False)}
        except Exception as error:
            raise UserError(
                f"{type(model).__name__} fails on sample=…, the arguments of its forward for a "
                f"batch: {type(error).__name__}: {short(error)}."
            ) from error
        try:
            recording = _recorded(model, cuts, sample)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"{type(model).__name__} cannot be cut into stages, for its forward cannot be "
                f"recorded: {short(error)}. Pass an nn.Sequential, a list of blocks, or put this "
                f"code into a submodule: one that cannot be recorded stays whole and runs as it is."
            ) from error
        blocks = cut_recording(recording, cuts, model)
        chain = _Chain(nn.ModuleList(module for _, module in blocks))
        for mode in (True, False):
            _compare(model, wanted[mode], _tried(chain, mode, sample))
    if home != device:
        for _, module in blocks:
            _move(module, home, device)
    return blocks


class _Chain(nn.Module):
    """Blocks, one after the other."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        value: Any = Arguments(args, kwargs)
        for block in self.blocks:
            value = call(block, value)
        return value


def _tried(model: nn.Module, training: bool, sample: Arguments) -> Any:
    """The output for the sample, with the same random numbers every time."""
    copies = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), sample)
    with state_restored([model]), saved_tensors_hooks(forget, recall):
        model.train(training)
        torch.manual_seed(_SEED)
        random.seed(_SEED)
        np.random.seed(_SEED)
        return call(model, copies)


def _recorded(model: nn.Module, cuts: Sequence[str], sample: Arguments) -> Recording:
    whole: dict[nn.Module, str] = {}
    while True:
        # Ends, because `whole` grows in every round but the last and cannot hold more than all
        # submodules.
        known = len(whole)
        recordings = []
        for training in (True, False):
            with state_restored([model]):
                model.train(training)
                recordings.append(Recorder(model, cuts, whole).record(sample))
        first, second = recordings
        if len(whole) > known:  # one of them had to close what the other may have opened
            continue
        differs = _difference(first, second, model)
        if differs is None:
            first.attributes["training"] = model.training
            return first
        if differs is model:
            raise UserError(
                f"{type(model).__name__} cannot be cut into stages: {_BY_MODE}, beside single "
                "values. Put what differs into a submodule."
            )
        # What has the same code has the same problem.
        alike = [part for part in model.modules() if type(part) is type(differs)]
        whole |= dict.fromkeys((part for part in alike if part is not model), _BY_MODE)


def _difference(first: Recording, second: Recording, model: nn.Module) -> nn.Module | None:
    """The innermost module that does something else in the second recording; None: there is none,
    and the first one is now right for both modes."""
    # The recordings agree node by node, or not at all: the first pair that differs tells where the
    # code took another way. Lengths are compared last.
    pairs = list(zip(first.graph.nodes, second.graph.nodes, strict=False))
    same = {two: one for one, two in pairs}
    chosen: list[tuple[fx.Node, Any, Any]] = []
    for one, two in pairs:
        alike = (one.op, one.target) == (two.op, two.target) and _alike_attributes(
            one, first.attributes, second.attributes
        )
        if not alike or not _same_nodes((one.args, one.kwargs), (two.args, two.kwargs), same):
            return _innermost(one, two, model)
        # Noted, and not changed yet: the graph must stay as it is while nodes are still being
        # compared.
        chosen.append((one, two.args, two.kwargs))
    if len(first.graph.nodes) != len(second.graph.nodes):
        return _innermost(*pairs[-1], model)
    for one, args, kwargs in chosen:
        if one.target is not require or one.args[:2] != args[:2]:
            _choose(first.graph, one, args, kwargs)
    return None


def _innermost(one: fx.Node, two: fx.Node, model: nn.Module) -> nn.Module:
    """Around one of the nodes: what is closed there is not in the way when they are compared again,
    and if that was not enough, the next one out is."""
    stacks = sorted((node.meta.get("stack", ()) for node in (one, two)), key=len)
    return stacks[-1][-1] if stacks[-1] else model


def _alike_attributes(node: fx.Node, first: dict[str, Any], second: dict[str, Any]) -> bool:
    if node.op != "get_attr" or node.target == "training":
        return True
    one, two = first[str(node.target)], second[str(node.target)]
    return one is two or (not isinstance(one, torch.Tensor) and one == two)


def _same_nodes(one: Any, two: Any, same: dict[fx.Node, fx.Node]) -> bool:
    """Whether two arguments differ in plain values at most."""
    if isinstance(one, fx.Node) or isinstance(two, fx.Node):
        return isinstance(two, fx.Node) and same.get(two) is one
    if isinstance(one, (tuple, list)) and isinstance(two, (tuple, list)):
        return len(one) == len(two) and all(
            _same_nodes(mine, other, same) for mine, other in zip(one, two, strict=True)
        )
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(_same_nodes(one[k], two[k], same) for k in one)
    if isinstance(one, slice) and isinstance(two, slice):
        return _same_nodes(_ends(one), _ends(two), same)
    return not isinstance(one, (tuple, list, dict, slice)) and not isinstance(
        two, (tuple, list, dict, slice)
    )


def _ends(one: slice) -> tuple[Any, Any, Any]:
    return one.start, one.stop, one.step


def _choose(graph: fx.Graph, node: fx.Node, args: Any, kwargs: Any) -> None:
    """Lets a node take the plain values of the second recording in evaluation."""

    def merged(one: Any, two: Any) -> Any:
        if isinstance(one, fx.Node):
            return one
        if isinstance(one, (tuple, list)):
            made = [merged(mine, other) for mine, other in zip(one, two, strict=True)]
            return tuple(made) if isinstance(one, tuple) else made
        if isinstance(one, dict):
            return {key: merged(one[key], two[key]) for key in one}
        if isinstance(one, slice):
            return slice(*merged(_ends(one), _ends(two)))
        if type(one) is type(two) and (one == two or one is two):
            return one
        with graph.inserting_before(node):
            training = graph.create_node("get_attr", "training")
            chosen = graph.create_node("call_function", by_mode, (training, one, two))
        for each in (training, chosen):
            each.meta |= {"module": "", "differentiable": False}
        return chosen

    node.args = merged(tuple(node.args), tuple(args))
    node.kwargs = merged(dict(node.kwargs), dict(kwargs))


def _compare(model: nn.Module, wanted: Any, found: Any) -> None:
    """Raises `UserError` if the blocks do not give what the model gives."""
    ours, theirs = (_computed(output) for output in (found, wanted))
    try:
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    except AssertionError as error:
        raise UserError(
            f"{type(model).__name__} cannot be cut into stages: what was recorded of its forward "
            f"does not give the model's own output for the sample ({str(error).splitlines()[0]}). "
            "Pass an nn.Sequential or a list of blocks."
        ) from error


def _computed(output: Any) -> list[Any]:
    leaves = pytree.tree_leaves(output, is_leaf=is_no_nest)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _move(module: nn.Module, home: torch.device, device: torch.device) -> None:
    """What was recorded on one device is to run on another."""
    assert isinstance(module, fx.GraphModule)

    def moved(value: Any) -> Any:
        return device if isinstance(value, torch.device) and value == home else value

    for node in module.graph.nodes:
        node.args = fx.node.map_aggregate(node.args, moved)
        node.kwargs = fx.node.map_aggregate(node.kwargs, moved)
    module.recompile()

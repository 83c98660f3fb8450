"""Cuts a recorded forward into modules that run one after the other.

A cut is a point between two operations. The values that were computed before it and are used after
it are live: they travel. If that is one value, it travels as it is, otherwise as a tuple. So a skip
connection that spans several blocks is handed on by each of them. So are masks, positions and
labels, which have no gradient and are needed by many blocks.

    x ─► a ─► b ─► + ─► c         before a: x    before b: a and x    before +: b and x
    └──────────────┘              before c: the sum

Parameters and buffers do not travel. A block has those that it uses; two blocks that use the same
parameter both hold it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from farandole.errors import UserError, nearest
from farandole.layout.recording.aliases import alias_root, written_roots
from farandole.layout.recording.state.recorded_state import RecordedState

WHOLE = "whole"
"""Under this name a block's `meta` says what in it could not be recorded, and why."""
STATE = "state"
"""Under this name it has the plain values that the recording took as they were."""


class Recording(NamedTuple):
    """A model's forward as a graph."""

    graph: fx.Graph
    attributes: dict[str, Any]  # what the names in the graph stand for
    starts: dict[nn.Module, fx.Node]  # by submodule, the first node of its first call
    whole: dict[nn.Module, str]  # submodules that could not be recorded, and why
    opened: dict[str, nn.Module]  # modules whose inside was recorded, by name
    read: list[torch.Tensor]  # tensors of which values, and not look-ups, were recorded


def recorded_states(blocks: Iterable[nn.Module]) -> list[RecordedState]:
    """What the recordings that blocks were cut from took as it was."""
    found = [
        block.meta[STATE]
        for block in blocks
        if isinstance(block, fx.GraphModule) and STATE in block.meta
    ]
    return list({id(state): state for state in found}.values())


class _Place(NamedTuple):
    """Where a block begins."""

    name: str
    node: fx.Node


class _Order:
    """The operations of a graph in order, the inputs first and the output last."""

    def __init__(self, recording: Recording) -> None:
        graph, self.attributes, self.whole = recording.graph, recording.attributes, recording.whole
        self.state = RecordedState(recording.opened, recording.read)
        self.nodes: list[fx.Node] = [node for node in graph.nodes if node.op != "get_attr"]
        self.inputs = sum(node.op == "placeholder" for node in self.nodes)
        self.position = {node: index for index, node in enumerate(self.nodes)}
        self.last_use = {
            node: max((self.position[user] for user in node.users), default=-1)
            for node in self.nodes
        }

    def live(self, point: int) -> list[fx.Node]:
        """What travels if the graph is cut before operation number `point`."""
        return [node for node in self.nodes[:point] if self.last_use[node] >= point]

    def overwritten(self, point: int) -> fx.Node | None:
        """The operation that would overwrite what travels, if there is one."""
        for first, last, culprit in self._inseparable():
            if first < point <= last:
                return culprit
        return None

    def _inseparable(self) -> Iterator[tuple[int, int, fx.Node]]:
        """From where to where one block must reach, and the operation because of which: a value and
        what is written to it; all uses of a buffer that is written to."""
        writes: dict[str | fx.Node, int] = {}
        uses: dict[str | fx.Node, list[int]] = {}
        for position, node in enumerate(self.nodes):
            for root in written_roots(node, self.attributes):
                writes[_held(root)] = position
            for root in {alias_root(each, self.attributes) for each in node.all_input_nodes}:
                uses.setdefault(_held(root), []).append(position)
        for written, last in writes.items():
            # A buffer lives in one block. Two blocks on two ranks would each write to a copy, so
            # all its uses must be on one side of a cut.
            if isinstance(written, str):
                yield uses[written][0], uses[written][-1], self.nodes[last]
            elif written in self.position:
                yield self.position[written], last, self.nodes[last]

    def places(self) -> list[int]:
        """The points at which one value alone travels, not counting those that have no gradient,
        and is not overwritten later."""
        count = len(self.nodes)
        # Both are lists of differences: +1 where something begins, −1 behind its end. Their running
        # sums tell for every point how many values are alive and how many writes it would separate,
        # in one pass over the graph.
        live, overwritten = [0] * (count + 1), [0] * (count + 1)
        for position, node in enumerate(self.nodes):
            # A graph that was recorded without a sample does not know what has a gradient.
            if node.meta.get("differentiable", True) and self.last_use[node] >= 0:
                live[position + 1] += 1
                live[self.last_use[node] + 1] -= 1
        for first, last, _ in self._inseparable():
            overwritten[first + 1] += 1
            overwritten[last + 1] -= 1
        sums = zip(accumulate(live), accumulate(overwritten), strict=True)
        return [
            point
            for point, (alive, changed) in enumerate(sums)
            if self.inputs < point < count - 1 and alive == 1 and not changed
        ]

    def weighs(self, first: int, stop: int) -> bool:
        """Whether there is a layer or a parameter among these operations."""
        nodes = self.nodes[first:stop]
        used = {str(each.target) for node in nodes for each in node.all_input_nodes}
        return any(node.op == "call_module" for node in nodes) or any(
            isinstance(self.attributes.get(name), nn.Parameter) for name in used
        )

    def name(self, first: int, stop: int) -> str:
        for node in self.nodes[first:stop]:
            # The first submodule at work, where that was recorded.
            if node.meta.get("differentiable"):
                return str(node.meta["module"] or node.name)
        layers = [str(node.target) for node in self.nodes[first:stop] if node.op == "call_module"]
        return layers[0] if layers else self.nodes[first].name


def _held(root: fx.Node) -> str | fx.Node:
    """By its name, what the model holds: every look-up is a node of its own."""
    return str(root.target) if root.op == "get_attr" else root


def cut_recording(
    recording: Recording, cuts: Sequence[str], model: nn.Module
) -> list[tuple[str, nn.Module]]:
    """Name and module of each block. The parameters keep the names they have in the model.

    Blocks begin at the submodules in `cuts`; without any, wherever they may.
    """
    order = _Order(recording)
    if not cuts:
        return _cut_everywhere(order, model)
    return _cut_at(order, [_place(cut, model, recording) for cut in cuts], model)


def _cut_everywhere(order: _Order, model: nn.Module) -> list[tuple[str, nn.Module]]:
    """A block begins wherever a single value is live, but never with a mere function.

    Functions (a flatten, an activation) go with the layer that they follow.
    """
    end = len(order.nodes) - 1
    begin, points = order.inputs, order.places()
    starts, weighs = [begin], False
    for first, stop in zip([begin, *points], [*points, end], strict=True):
        # A block without layers or weights would be a stage that computes next to nothing.
        if order.weighs(first, stop):
            if weighs:
                starts.append(first)
            weighs = True
    stops = [*starts[1:], end]
    names = [order.name(first, stop) for first, stop in zip(starts, stops, strict=True)]
    return _modules(order, starts, names, model)


def _cut_at(
    order: _Order, places: Sequence[_Place], model: nn.Module
) -> list[tuple[str, nn.Module]]:
    """A block begins at each place, and one at the beginning."""
    end = len(order.nodes) - 1
    begins: dict[int, str] = {}
    for name, node in places:
        # Look-ups are not in the order of operations: the block begins at the first operation
        # behind them.
        while node.op == "get_attr":
            node = node.next
        point = order.position[node]
        culprit = order.overwritten(point)
        if point > order.inputs and culprit is not None:
            raise UserError(
                f"cuts: no block can begin at {name!r}: {culprit.name!r} after it works in place "
                f"on a value from before it. Cut elsewhere, or compute it with inplace=False."
            )
        if point < end:
            begins.setdefault(point, name)
    first = order.inputs
    if begins and not order.weighs(first, min(begins)):
        begins[first] = begins.pop(min(begins))  # functions before the first layer go with it
    begins.setdefault(first, order.name(first, min(begins, default=end)))
    starts = sorted(begins)
    return _modules(order, starts, [begins[point] for point in starts], model)


def _place(cut: str, model: nn.Module, recording: Recording) -> _Place:
    try:
        module = model.get_submodule(cut)
    except AttributeError:
        names = [name for name, _ in model.named_modules() if name]
        raise UserError(
            f"cuts: the model has no submodule {cut!r}. {nearest(cut, names)}"
        ) from None
    if module in recording.starts:
        return _Place(cut, recording.starts[module])
    for name, outer in model.named_modules():
        if outer in recording.whole and cut.startswith(f"{name}."):
            raise UserError(
                f"cuts: no block can begin at {cut!r}: {name!r} stays whole, for its forward "
                f"cannot be traced: {recording.whole[outer]}."
            )
    called = {name for name, part in model.named_modules() if name and part in recording.starts}
    raise UserError(
        f"cuts: the model's forward does not call {cut!r} itself, so no block can begin there. "
        f"{nearest(cut, called)}"
    )


def _modules(
    order: _Order, starts: Sequence[int], names: Sequence[str], model: nn.Module
) -> list[tuple[str, nn.Module]]:
    kept = set(model.state_dict())
    stops = [*starts[1:], len(order.nodes) - 1]
    return [
        (name, _module(_subgraph(order, first, stop), order, kept, model))
        for name, first, stop in zip(names, starts, stops, strict=True)
    ]


def _subgraph(order: _Order, first: int, stop: int) -> fx.Graph:
    graph = fx.Graph()
    entering = order.live(first)
    copies: dict[fx.Node, fx.Node] = {}
    # The first block takes the model's arguments, all of them, also those that no operation uses.
    if first == order.inputs:
        copies |= {node: graph.placeholder(str(node.target)) for node in order.nodes[:first]}
    elif len(entering) == 1:
        copies[entering[0]] = graph.placeholder("value")
    else:
        value = graph.placeholder("value")
        for index, node in enumerate(entering):
            copies[node] = graph.call_function(operator.getitem, (value, index))

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:
            assert node.op == "get_attr", f"{node} is used before it is computed"
            # Look-ups are copied into every block that uses them: weights do not travel.
            copies[node] = graph.node_copy(node)
        return copies[node]

    for node in order.nodes[first:stop]:
        copies[node] = graph.node_copy(node, copied)
    if stop == len(order.nodes) - 1:
        result = fx.map_arg(order.nodes[stop].args[0], copied)
    else:
        leaving = [copied(node) for node in order.live(stop)]
        result = leaving[0] if len(leaving) == 1 else tuple(leaving)
    graph.output(result)
    return graph


def _module(graph: fx.Graph, order: _Order, kept: set[str], model: nn.Module) -> nn.Module:
    attributes = order.attributes
    used = [str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")]
    module = fx.GraphModule({name: attributes[name] for name in used}, graph, type(model).__name__)
    if "training" not in used:
        module.training = model.training
    module.meta[STATE] = order.state
    module.meta[WHOLE] = {
        name: order.whole[found]
        for name in used
        if isinstance(found := attributes[name], nn.Module) and found in order.whole
    }
    for name in used:
        found = attributes[name]
        if isinstance(found, torch.Tensor) and not isinstance(found, nn.Parameter):
            # fx keeps every tensor for the checkpoint; this one only if the model does.
            owner, _, field = name.rpartition(".")
            module.get_submodule(owner).register_buffer(field, found, persistent=name in kept)
    return module

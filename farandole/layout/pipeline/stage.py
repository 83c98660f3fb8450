"""One stage on one rank: forwards and backwards of micro-batches, in any order that is asked for.

What comes in and goes out is any nest of tensors. Between a micro-batch's forward and its backward
the stage keeps where its graph begins and ends:

    forward    input leaves ── blocks ──▶ output roots ──▶ (last stage) loss
    backward   their gradients ◀── autograd ── gradients of the roots, from the next stage

A backward can be split: first what the stage before waits for, later what only the update needs.
PyTorch's own pipelining has a function that finds where to cut the graph for that. It is used here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from farandole.layout.arguments import Arguments
from farandole.layout.nested_tensors import tensors_of
from farandole.layout.objective import LossFunction, one_number
from farandole.layout.partition.stage_module import PassId, StageModule
from farandole.layout.pipeline.masked_means import MaskedMeans, Watch
from farandole.layout.pipeline.memory import ActivationMeter
from farandole.layout.pipeline.recompute import recomputed
from farandole.layout.pipeline.versions import Weights
from farandole.layout.recording.state.forward_changes import ForwardChanges
from farandole.layout.tiles.core.tiling import Tiling

Gradients = list[torch.Tensor | None]
"""One for each tensor that travelled, in order; None where there is none."""
Key = tuple[int, int]
"""A micro-batch: the direction in which it is computed, and its number."""


@dataclass
class PendingBackward:
    """What is remembered of a forward until its backward."""

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    version: int
    rest: Callable[[], None] | None = None  # the second half of a split backward


class Stage:
    """The blocks of one stage. `loss` is what the last stage ends with."""

    def __init__(
        self,
        number: int,
        weights: Weights,
        loss: LossFunction | None,
        *,
        recompute: bool = False,
        offload: bool = False,
        lowered: Callable[[], AbstractContextManager[object]] = nullcontext,
        tiling: Tiling | None = None,
        means: MaskedMeans | None = None,
        changes: ForwardChanges | None = None,
    ) -> None:
        self.number = number
        self.weights = weights
        self._loss = loss
        self._recompute = recompute
        self._offload = offload
        self._lowered = lowered
        self._tiling = tiling
        self.means = means  # checks that micro-batches are weighed right
        self._changes = changes  # checks that a forward changes only what it may
        self.meter: ActivationMeter | None = None  # while activations are measured
        self._pending: dict[Key, PendingBackward] = {}

    @property
    def module(self) -> StageModule:
        return self.weights.module

    def forward(
        self,
        key: Key,
        value: Any,
        pass_id: PassId,
        version: int,
        target: Any = None,
        samples: int = 0,
    ) -> Any:
        """The output of this stage for a micro-batch of so many samples; of the last one, its loss.

        On tiles, the loss of all shards is the sum of theirs.
        """
        if self._tiling is not None and self.number == 0:
            value = self._tiling.cut(value)
        inputs = _tensors(value)
        self.weights.begin(version)
        loss = self._loss

        def layers(value: Any) -> Any:
            return self.weights.run(value, pass_id, version)

        def run(value: Any) -> Any:
            if self._tiling is None:
                result = layers(value)
                return result if loss is None else one_number(loss(result, target))
            if loss is None:
                return self._tiling.forward(layers, value, samples)
            return one_number(self._tiling.loss(layers, value, samples, loss, target))

        means = self._watched(pass_id, samples)
        changes = nullcontext() if self._changes is None else self._changes.looked_for()
        with (
            self._lowered(),
            self._metered(key, inputs, version),
            self._away(),
            means as watch,
            changes,
        ):
            if watch is not None and loss is not None:
                loss = watch.around(loss)
            result = self._recomputed(run, value) if self._recompute else run(value)
        outputs = _tensors(result)
        # Keyed by direction and micro-batch: with two directions, one rank may hold the same stage
        # for two copies of the model, with backwards in either order.
        self._pending[key] = PendingBackward(inputs, outputs, version)
        return result

    def _watched(self, pass_id: PassId, samples: int) -> AbstractContextManager[Watch | None]:
        if self.means is None or self._loss is None:
            return nullcontext()
        return self.means.of(pass_id.step, pass_id.micro, samples)

    def check_means(self) -> None:
        """Raises `UserError` if the micro-batches so far are not weighed right."""
        if self.means is not None:
            self.means.check()

    def _recomputed(self, run: Callable[[Any], Any], value: Any) -> Any:
        tiled = self._tiling is not None
        return recomputed(run, value, self.module, offload=self._offload, to_the_end=tiled)

    def _away(self) -> AbstractContextManager[object]:
        """What is kept for the backward and not computed again waits in the host's memory."""
        return torch.autograd.graph.save_on_cpu() if self._offload else nullcontext()

    def backward(self, key: Key, gradients: Gradients) -> Gradients:
        """The gradients of what came in; those of the weights are added to theirs."""
        pending = self._pending.pop(key)
        roots, given = _roots(pending.outputs, gradients)
        if roots:
            torch.autograd.backward(roots, given)
        self._ended(key, pending.version)
        return _taken(pending.inputs)

    def no_gradients(self, key: Key) -> Gradients:
        """For outputs that nobody here computes with: their backward is asked for all the same."""
        return [torch.zeros_like(output) for output in self._pending[key].outputs]

    def backward_input(self, key: Key, gradients: Gradients) -> Gradients:
        """The first half: the gradients of what came in. The weights' wait."""
        pending = self._pending[key]
        roots, given = _roots(pending.outputs, gradients)
        inputs = [tensor for tensor in pending.inputs if tensor.requires_grad]
        weights = [weight for weight in self.module.parameters() if weight.requires_grad]
        if not inputs:  # nobody waits: all of it is the second half
            pending.rest = partial(torch.autograd.backward, roots, given) if roots else _nothing
        elif not roots or not _can_be_split(roots, inputs, weights):
            if roots:
                torch.autograd.backward(roots, given)
            pending.rest = _nothing
        else:
            # Here, for it is private to torch: only who splits backwards depends on it.
            from torch.distributed.pipelining._backward import stage_backward_input

            # It detaches the outputs in place, which views do not allow, and which an input that
            # is handed on as it came would not survive.
            roots = [root.clone() if root._is_view() or root.is_leaf else root for root in roots]
            _, groups = stage_backward_input(roots, given, inputs, iter(weights))
            pending.rest = partial(_finish, weights, groups)
        return _taken(pending.inputs)

    def backward_weight(self, key: Key) -> None:
        """The second half: the gradients of the weights."""
        pending = self._pending.pop(key)
        assert pending.rest is not None, "the first half comes first"
        pending.rest()
        self._ended(key, pending.version)

    def _metered(
        self, key: Key, inputs: Sequence[torch.Tensor], version: int
    ) -> AbstractContextManager[None]:
        if self.meter is None:
            return nullcontext()
        return self.meter.forward((self.number, key), inputs, self.weights.storages(version))

    def _ended(self, key: Key, version: int) -> None:
        self.weights.done(version)
        if self.meter is not None:
            self.meter.backward((self.number, key))

    def predict(self, value: Any, samples: int = 0) -> Any:
        """The output of this stage, of the weights themselves; nothing is kept. On tiles, the last
        stage returns this shard's samples."""
        with self._lowered():
            if self._tiling is None:
                return self.module(value)
            if self.number == 0:
                value = self._tiling.cut(value)
            return self._tiling.predict(self.module, value, samples, self._loss is not None)

    def forget(self) -> None:
        """After a failure: lets go of all activations."""
        self._pending.clear()


def _nothing() -> None:
    """The second half of a backward whose first half was all of it."""


def _finish(weights: Sequence[torch.Tensor], groups: list[dict[str, Any]]) -> None:
    from torch.distributed.pipelining._backward import stage_backward_weight

    # Where the first half did not come by, nothing is to be done.
    reached = [group for group in groups if group.get("grads") is not None]
    # It goes on with the gradients that the first half has found there. A hook of a tensor has
    # changed them once, and would do so again.
    handles = [
        node.register_prehook(partial(_as_found, found))
        for group in reached
        for found, node in zip(group["grads"], group["intermediates"], strict=True)
    ]
    fresh = [weight for weight in weights if weight.grad is None]
    try:
        stage_backward_weight(iter(weights), reached)  # type: ignore[arg-type]
    finally:
        for handle in handles:
            handle.remove()
    # Two weights may have got the same tensor, or one that travels: they will be added to.
    for weight in fresh:
        if weight.grad is not None:
            weight.grad = weight.grad.clone()


def _as_found(found: Any, gradients: Any) -> Any:
    return found


def _tensors(value: Any) -> list[torch.Tensor]:
    return tensors_of(tuple(value) if isinstance(value, Arguments) else value)


def _roots(
    outputs: Sequence[torch.Tensor], gradients: Gradients
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if output.requires_grad and gradient is not None
    ]
    return [output for output, _ in pairs], [gradient for _, gradient in pairs]


def _taken(inputs: Sequence[torch.Tensor]) -> Gradients:
    gradients: Gradients = []
    for tensor in inputs:
        # Every input has an entry, in order: the stage before matches them with its outputs by
        # position.
        gradients.append(tensor.grad if tensor.requires_grad else None)
        if tensor.requires_grad:
            tensor.grad = None
    return gradients


def _can_be_split(
    roots: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
) -> bool:
    """Whether the second half of a backward, which goes on from where the first half came by, finds
    all that the weights did, and once.

    Every root that depends on a weight must depend on an input too. And from each weight a single
    way must lead up to where it meets what comes from the inputs: a weight that is used twice is
    left to a whole backward.
    """
    wanted = {id(weight) for weight in weights}
    fed = {id(tensor) for tensor in inputs}
    above: dict[Any, list[Any]] = {}
    leaves: dict[int, Any] = {}  # by the identity of a leaf, its node
    for root in roots:
        found = _leaves_below(root, above)
        if found.keys() & wanted and not found.keys() & fed:
            return False
        leaves |= found
    met = _closure([leaves[each] for each in fed if each in leaves], above)
    for weight in weights:
        node = leaves.get(id(weight))
        if node is None:
            continue
        while node not in met:
            users = above.get(node, [])
            if len(users) != 1:
                return False
            node = users[0]
    return True


def _closure(nodes: Sequence[Any], above: Mapping[Any, list[Any]]) -> set[Any]:
    """Nodes, and all that lie above them."""
    found, waiting = set(nodes), list(nodes)
    while waiting:
        for node in above.get(waiting.pop(), []):
            if node not in found:
                found.add(node)
                waiting.append(node)
    return found


def _leaves_below(root: torch.Tensor, above: dict[Any, list[Any]]) -> dict[int, Any]:
    """By their identity, the nodes of the leaves that a root depends on. Adds to `above`, for each
    node, those that use it: as often as they do."""
    if root.grad_fn is None:
        return {id(root): root}
    leaves: dict[int, Any] = {}
    seen, waiting = {root.grad_fn}, [root.grad_fn]
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            leaves[id(node.variable)] = node
        visited = any(node in above.get(below, ()) for below, _ in node.next_functions)
        for below, _ in node.next_functions:
            if below is None:
                continue
            if not visited:
                above.setdefault(below, []).append(node)
            if below not in seen:
                seen.add(below)
                waiting.append(below)
    return leaves

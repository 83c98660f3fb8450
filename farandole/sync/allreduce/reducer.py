"""Averages gradients while the backward pass goes on, by hooks on the parameters themselves.

    backward      ∂w₄ ─ ∂w₃ ─ ∂w₂ ─ ∂w₁ ─┐
    bucket 0       └─────┴─▶ reduce ─────┤
    bucket 1                   └─────┴─▶ reduce ─▶ the pass ends: all are awaited

It does not matter what is called: the model, a submodule, a method of the script's own. Whatever
adds to a parameter's gradient runs its hook. The model stays the script's own object, with nothing
around it and nothing on it that a copy or a pickle would take along.

Ranks agree on what travels because they hold the same parameters: buckets are reduced in their
order, all of them in every pass. The first pass shows in which order gradients arrive on rank 0,
and the buckets are packed anew by that order.

A backward pass inside of another (a reentrant checkpoint) ends before the other does. There is no
way to ask for the end of the outer one, so then the pass is over when every parameter has its
gradient, and a parameter that never gets one is refused.
"""

from __future__ import annotations

import contextlib
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from farandole.comm import Group
from farandole.comm.gpu.cuda_graphs import refuse_capture
from farandole.sync.allreduce import refusals
from farandole.sync.allreduce.buckets import Bucket, UnfitGradientError, pack
from farandole.sync.allreduce.buffer_spread import BufferSpread
from farandole.sync.allreduce.reductions import Pending, Reduction
from farandole.sync.common.alignment import check_same_model
from farandole.sync.common.frozen import can_be_trained, thawed

_graph_task = torch._C._current_graph_task_id


class GradientReducer:
    """Averages the gradients of one model's trained parameters in every backward pass.

    It lives as long as its owner keeps it. The hooks on parameters hold weak references only.
    """

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        reduction: Reduction,
        *,
        optimizer: Optimizer | None = None,
        bucket_mib: float | None = None,
        spread_buffers: bool = True,
    ) -> None:
        self._model = model
        self._group = group
        self._reduction = reduction
        self._generation = group.generation
        self._bucket_mib = bucket_mib
        self._buffers = BufferSpread(model, group) if spread_buffers else None
        self._lock = threading.RLock()  # parameters on several devices arrive on several threads
        self.is_on = True
        self.notes_culprits = True
        """Whether each rank notes in its buckets that its gradients are not finite."""
        self.handed_out: list[Bucket] = []
        """The buckets whose averages are the parameters' gradients now."""
        self._handles: list[RemovableHandle] = []
        self._follow()
        self._before_step: RemovableHandle | None = None
        if optimizer is not None:
            me = weakref.ref(self)
            self._before_step = optimizer.register_step_pre_hook(
                lambda *_: _still(me, GradientReducer.require_whole)
            )
        weakref.finalize(self, reduction.close)

    # What is followed

    def _follow(self) -> None:
        """Every parameter that is trained now, in the order in which a backward may reach them."""
        for handle in self._handles:
            handle.remove()
        self._all = list(self._model.parameters())
        self._frozen = [p for p in self._all if not p.requires_grad]
        trained = [(n, p) for n, p in self._model.named_parameters() if p.requires_grad]
        self._names: dict[torch.Tensor, str] = {p: name for name, p in trained}
        self._trained = dict(trained)
        me = weakref.ref(self)

        # Called for every parameter in every pass: nothing is done here that need not be.
        def arrived(parameter: torch.Tensor) -> None:
            reducer = me()
            if reducer is not None and reducer.is_on:
                reducer._arrived(parameter)

        def arrived_by_turns(parameter: torch.Tensor) -> None:
            reducer = me()
            if reducer is not None and reducer.is_on:
                with reducer._lock:
                    reducer._arrived(parameter)

        def arrived_thawed(parameter: torch.Tensor) -> None:
            reducer = me()
            if reducer is not None and reducer.is_on:
                with reducer._lock:
                    reducer._arrived_thawed()

        # Autograd has a thread for each device, and gradients on one device arrive one by one. A
        # lock would take about as long as an arrival without it.
        if len({p.device for _, p in trained}) > 1:
            arrived = arrived_by_turns
        self._handles = [p.register_post_accumulate_grad_hook(arrived) for _, p in trained]
        for parameter in filter(can_be_trained, self._frozen):
            with thawed(parameter):
                hook = parameter.register_post_accumulate_grad_hook(arrived_thawed)
            self._handles.append(hook)
        # Autograd reaches the last layers first; the true order is learned in the first pass.
        self._settle(self._pack(trained[::-1], final=False), learns_order=True)

    def _pack(self, parameters: list[tuple[str, nn.Parameter]], *, final: bool) -> list[Bucket]:
        return pack(parameters, self._bucket_mib, ranks=self._group.most_ranks, final=final)

    def _settle(self, buckets: list[Bucket], *, learns_order: bool) -> None:
        self.buckets = buckets
        # By identity: the hash of a tensor is that too, and takes a call of Python's to get.
        self._home: dict[int, int] = {
            id(parameter): bucket.index for bucket in buckets for parameter in bucket.parameters
        }
        self._learns_order = learns_order
        self._close_pass()

    def _close_pass(self) -> None:
        self._pass: int | None = None  # the engine's number of the one under way
        self._seen: dict[int, torch.Tensor] = {}  # parameters that arrived in it, in order
        self._missing = [len(bucket.parameters) for bucket in self.buckets]
        # The bucket to be reduced next. A bucket that is full waits for those before it: which one
        # fills first may differ between ranks, and a reduction must meet the same one elsewhere.
        self._next = 0
        self._under_way: list[Pending] = []
        self._end_is_known = False

    def _abandon_pass(self) -> None:
        """Forgets a pass that has failed, once nothing under way uses its buckets."""
        for future in self._under_way:
            with contextlib.suppress(Exception):  # the pass has failed already
                future.wait()
        self._close_pass()

    def follow_changes(self) -> None:
        """*Together.* Between passes over the data: looks for parameters that were frozen, thawed,
        added or replaced.

        Parameters that are thawed within a pass over the data are noticed at the end of a backward
        pass.
        """
        if self._buffers is not None:
            self._buffers.look_for_modules()
        here = list(self._model.parameters())
        same = len(here) == len(self._all) and all(map(operator.is_, here, self._all))
        if not same or any(p.requires_grad != (p in self._names) for p in here) or self._misfits():
            check_same_model(self._model, self._group)
            self._follow()

    def _misfits(self) -> bool:
        """Whether the parameters have changed kind, as by `model.half()` or `.to(device)`."""
        # Those change gradients too, and so a view that is one: the buffer stays what it was.
        return any(
            (parameter.dtype, parameter.device, parameter.shape)
            != (view.dtype, view.device, view.shape)
            or (parameter.dtype.to_real(), parameter.device)
            != (bucket.buffer.dtype, bucket.buffer.device)
            for bucket in self.buckets
            for parameter, view in zip(bucket.parameters, bucket.gradients, strict=True)
        )

    def remove(self) -> None:
        """From now on gradients stay as they are computed."""
        for handle in self._handles:
            handle.remove()
        if self._before_step is not None:
            self._before_step.remove()
        self._reduction.close()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients accumulate on this rank; the next pass outside averages their sum."""
        # `Bucket.fill` copies what `parameter.grad` has accumulated, not what the last pass added.
        # So nothing needs to be remembered here.
        before, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = before

    # A pass

    def _arrived(self, parameter: torch.Tensor) -> None:
        # A number that the engine gives to each backward call. Another one: the first gradient of
        # a new pass, or of a reentrant checkpoint within the same one.
        if self._pass != _graph_task():
            self._enter_pass()
        key = id(parameter)
        if key in self._seen:
            raise refusals.arrived_twice(self._name(parameter))
        self._seen[key] = parameter
        home = self._home[key]
        self._missing[home] -= 1
        if self._missing[home]:
            return
        while self._next < len(self.buckets) and not self._missing[self._next]:
            self._reduce_next()
        if not self._end_is_known and self._next == len(self.buckets):
            self._await_end()

    def _arrived_thawed(self) -> None:
        """A gradient of a parameter that was frozen when `_follow` looked. It may be the only kind
        in this pass, which has to end here all the same: see `_include_thawed`."""
        if self._pass != _graph_task():
            self._enter_pass()

    def _enter_pass(self) -> None:
        """At the first gradient of a pass, and wherever a reentrant checkpoint begins or ends."""
        is_inner = _inside_of_a_backward()
        if is_inner and self._pass is not None:
            return
        refuse_capture("a backward pass")
        if self._end_is_known:  # there was another pass, and it has failed half-way
            self._abandon_pass()
        self._pass = torch._C._current_graph_task_id()
        self.handed_out = []
        if not is_inner:
            self._await_end()

    def _await_end(self) -> None:
        """Calls `_end_pass` when the innermost backward pass that runs now has ended."""
        me = weakref.ref(self)
        self._end_is_known = True
        torch.autograd.Variable._execution_engine.queue_callback(
            lambda: _still(me, GradientReducer._end_pass)
        )

    def _name(self, parameter: torch.Tensor) -> str:
        return next((n for n, p in self._model.named_parameters() if p is parameter), "a parameter")

    def _reduce_next(self) -> None:
        bucket = self.buckets[self._next]
        self._next += 1
        self._under_way.append(self._start(bucket))

    def _start(self, bucket: Bucket) -> Pending:
        with torch.no_grad():
            try:
                bucket.fill()
            except UnfitGradientError as unfit:
                name = self._name(unfit.parameter)
                raise refusals.unfit(name, unfit.gradient) from None
            if self.notes_culprits:
                bucket.note(self._group.rank)
            return self._reduction.reduce(bucket)

    def _end_pass(self) -> None:
        """The backward pass has reached all that it will reach."""
        if self._pass is None:
            return  # another model's pass has ended, or this one's end was seen already
        # Buckets that never filled are reduced too: some of their parameters got no gradient here,
        # and may have got one on another rank, which waits for this rank in the same bucket.
        while self._next < len(self.buckets):
            self._reduce_next()
        self._reduction.finish(self._under_way, self._spread)
        for bucket in self.buckets:
            bucket.hand_out()
        self.handed_out = self.buckets
        seen = list(self._seen.values())
        self._close_pass()
        if any(p.requires_grad for p in self._frozen):
            self._include_thawed()
        if self._learns_order:
            self._learn_order([self._names[p] for p in seen if p in self._names])
        if self._generation != self._group.generation:
            # Here, after a pass that all ranks have ended, and not where the loss is noticed: some
            # notice it in one pass, some in the next, and their buckets must match all the time.
            self.regroup()

    def _spread(self) -> None:
        if self._buffers is not None:
            self._buffers.spread()

    def _include_thawed(self) -> None:
        """Averages gradients of parameters that were thawed since the last `_follow`.

        In the pass that has just ended they filled no buckets.
        """
        known = self._names
        self._follow()
        thawed = [item for item in self._trained.items() if item[1] not in known]
        buckets = self._pack(thawed, final=False)
        futures = [self._start(bucket) for bucket in buckets]
        self._reduction.finish(futures, lambda: None)
        for bucket in buckets:
            bucket.hand_out()
        self.handed_out = [*self.handed_out, *buckets]

    def _learn_order(self, names: list[str]) -> None:
        """Packs the buckets by the order in which gradients arrived on rank 0.

        All ranks take rank 0's: arrival differs between ranks where threads or branches do.
        """
        first = self._group.broadcast_json(names)
        rest = [name for name in reversed(self._trained) if name not in first]
        self.regroup([*first, *rest])

    @property
    def order(self) -> list[str] | None:
        """In which gradients are expected; None: it is not known yet."""
        if self._learns_order:
            return None
        return [name for bucket in self.buckets for name in bucket.names]

    def regroup(self, order: list[str] | None = None) -> None:
        """Packs the buckets anew, in memory that the ranks of now can share. All ranks pass the
        same `order`, or none, if all have the same: then their buckets match, whoever of them has
        done this already."""
        order = order or self.order
        self._generation = self._group.generation
        expected = list(self._trained.items())[::-1]
        if order is not None:
            expected = [(name, self._trained[name]) for name in order]
        self._settle(self._pack(expected, final=order is not None), learns_order=order is None)

    def require_whole(self) -> None:
        """Before a step: raises if a gradient that it would apply is not an average."""
        if not self._seen:
            return  # every pass since the last step has ended
        lacking = [
            name for parameter, name in self._names.items() if id(parameter) not in self._seen
        ]
        failed = self._end_is_known
        self._abandon_pass()
        raise refusals.failed_pass() if failed else refusals.unreached(lacking)


def _still(me: weakref.ref[GradientReducer], method: Callable[..., None], *args: Any) -> None:
    reducer = me()
    if reducer is not None:
        method(reducer, *args)


def _inside_of_a_backward() -> bool:
    """Whether this backward pass was begun by a function's `backward` in another one."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is BackwardCFunction.apply.__code__:
            return True
        frame = frame.f_back
    return False

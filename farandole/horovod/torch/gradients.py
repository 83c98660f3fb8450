"""A model's gradients on their way: asked for when the backward pass has made them.

    backward    grad of layer 3 ──▶ asked for      grad of layer 2 ──▶ asked for       …
    step        waits until all are there; those that no backward pass has made count as zeros

A parameter belongs to a batch: of itself, or of a group that is to be sent in one go. A batch is
asked for when all of its gradients have come, as often as there are passes in a step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from farandole.comm.tensors import kind_of
from farandole.errors import UserError
from farandole.horovod import session
from farandole.horovod.common.exceptions import HorovodInternalError
from farandole.horovod.common.process_sets import ProcessSet
from farandole.horovod.engine.engine import Engine
from farandole.horovod.engine.requests import ALLREDUCE, Request
from farandole.horovod.engine.work import Work
from farandole.horovod.torch.compression import Compressor, NoneCompressor
from farandole.horovod.torch.operations import ReduceOp
from farandole.horovod.torch.reductions import allreduce_async_
from farandole.horovod.torch.sparse import sparse_allreduce_async
from farandole.serialization.sparse import checked_sparse


class _Batch:
    """Parameters whose gradients are sent together."""

    def __init__(self, name: str, params: Sequence[nn.Parameter]) -> None:
        self.name = name
        self.params = list(params)
        self.request: Request | None = None  # as it was last time
        self.flight: _Flight | None = None

    @property
    def is_trained(self) -> bool:
        return any(p.requires_grad for p in self.params)


class _Flight:
    """A batch under way."""

    def __init__(
        self, engine: Engine | None, work: Work | None, finishes: Sequence[Callable[[], None]]
    ) -> None:
        self._engine, self._work, self._finishes = engine, work, finishes

    def wait(self) -> None:
        if self._work is not None:
            assert self._engine is not None
            self._engine.wait(self._work)
        for finish in self._finishes:
            finish()


class Gradients:
    """Those of one optimizer."""

    def __init__(
        self,
        names: dict[nn.Parameter, str],
        groups: Sequence[Sequence[nn.Parameter]],
        *,
        compression: type[Compressor],
        passes: int,
        op: ReduceOp,
        predivide: float,
        sparse_as_dense: bool,
        steps_by_sparse: bool,
        process_set: ProcessSet,
    ) -> None:
        """`steps_by_sparse`: the optimizer takes no others, so those that travel as dense ones must
        be sparse again when they are there."""
        self._compression = compression
        self._op = op
        self._predivide = predivide
        self._sparse_as_dense = sparse_as_dense
        self._steps_by_sparse = steps_by_sparse
        self._process_set = process_set
        self._passes = passes
        self._batches: list[_Batch] = []
        self._left: dict[int, int] = {}  # by parameter: backward passes until it is sent
        self._sparse: dict[nn.Parameter, int] = {}  # those whose gradients were: in how many dims
        session.current().optimizer_number(self, process_set)  # now: they may send in any order
        grouped = {id(p) for group in groups for p in group}
        self._take_on(
            _Batch(f"group.{index}.{names[group[0]]}", group) for index, group in enumerate(groups)
        )
        self.add({p: name for p, name in names.items() if id(p) not in grouped})

    def add(self, names: dict[nn.Parameter, str]) -> None:
        """Takes on further parameters, each to be sent by itself."""
        self._take_on(_Batch(name, [p]) for p, name in names.items())

    def _take_on(self, batches: Iterable[_Batch]) -> None:
        if not self._process_set.included():
            return  # this rank trains by itself
        # The parameters may outlive their optimizer, and get another one.
        weakly = weakref.ref(self)
        hooks = []
        for batch in batches:
            self._batches.append(batch)
            for p in batch.params:
                self._left[id(p)] = self._passes
                hooks.append(p.register_post_accumulate_grad_hook(partial(_tell, weakly, batch)))
        weakref.finalize(self, _remove, hooks)

    def set_passes(self, passes: int) -> None:
        if passes < 1:
            raise UserError(f"backward_passes_per_step={passes} must be 1 or more.")
        self._passes = passes
        self._left = dict.fromkeys(self._left, passes)

    @property
    def under_way(self) -> bool:
        return any(batch.flight is not None for batch in self._batches)

    def wait(self) -> None:
        """When it returns, every `grad` is that of all ranks."""
        # What is frozen, for now, has no gradient on any rank.
        waiting = [batch for batch in self._batches if batch.flight or batch.is_trained]
        try:
            for batch in waiting:
                if batch.flight is None:  # another rank may have made what this one has not
                    self._send(batch)
            failed: HorovodInternalError | None = None
            for batch in waiting:
                assert batch.flight is not None
                try:
                    batch.flight.wait()
                except HorovodInternalError as error:  # the others are awaited all the same: their
                    failed = failed or error  # names are free for the next step then
            if failed is not None:
                raise failed
        finally:
            self.forget()

    def forget(self) -> None:
        """As before the first backward pass of a step."""
        for batch in self._batches:
            batch.flight = None
        self._left = dict.fromkeys(self._left, self._passes)

    def _made(self, batch: _Batch, p: torch.Tensor) -> None:
        """The backward pass has added to `p.grad`."""
        left = self._left
        if batch.flight is not None:
            raise AssertionError(
                f"the gradient of {batch.name!r} was made more than {self._passes} times before "
                "optimizer.step(). Raise backward_passes_per_step to accumulate gradients."
            )
        left[id(p)] -= 1
        if len(batch.params) == 1:
            ready = left[id(p)] <= 0
        else:
            ready = all(left[id(other)] <= 0 for other in batch.params)
        if ready:
            self._send(batch)

    def _send(self, batch: _Batch) -> None:
        for p in batch.params:
            if p.grad is None:
                p.grad = self._zeros(p)
            if p.grad.is_sparse:
                self._sparse[p] = p.grad.sparse_dim()
                p.grad = p.grad.to_dense() if self._sparse_as_dense else p.grad
        again = self._sparse_as_dense and self._steps_by_sparse
        finishes = [partial(self._make_sparse_again, batch)] if again else []
        here = session.current()
        if self._process_set.process_set_id == 0 and here.size == 1:
            batch.flight = _Flight(None, None, finishes)
            return
        grads = [p.grad for p in batch.params if p.grad is not None]
        if any(grad.is_sparse for grad in grads):
            batch.flight = self._send_sparse(here, batch)
            return
        engine = here.engine(self._process_set)
        if self._compression is not NoneCompressor:
            pairs = [self._compression.compress(grad) for grad in grads]
            finishes.insert(0, partial(self._put_back, grads, pairs))
            grads = [small for small, _ in pairs]
        work = Work(self._request(here, batch, grads), grads, grads)
        engine.submit(work, quiet=True)
        batch.flight = _Flight(engine, work, finishes)

    def _zeros(self, p: nn.Parameter) -> torch.Tensor:
        """What no backward pass has made, in the form that other ranks' have, as far as known."""
        dims = self._sparse.get(p, 1 if self._steps_by_sparse else None)
        if dims is None:
            return torch.zeros_like(p)
        nowhere = torch.empty((dims, 0), dtype=torch.int64, device=p.device)
        nothing = p.detach().new_empty((0, *p.shape[dims:]))
        return checked_sparse(nowhere, nothing, p.shape)

    def _make_sparse_again(self, batch: _Batch) -> None:
        for p in batch.params:
            if p.grad is not None and p in self._sparse:
                p.grad = p.grad.to_sparse(self._sparse[p])

    def _request(
        self, here: session.Session, batch: _Batch, grads: Sequence[torch.Tensor]
    ) -> Request:
        name = self._name(here, batch)
        before = batch.request
        kinds = tuple(kind_of(grad.dtype) for grad in grads)
        device = grads[0].device.type
        known = (before.name, before.dtypes, before.device) if before is not None else None
        # A gradient keeps its shape; what somebody's compressor makes of it need not.
        same = self._compression is NoneCompressor or (before and before.shapes == _shapes(grads))
        if before is not None and known == (name, kinds, device) and same:
            return before
        batch.request = Request(
            name,
            ALLREDUCE,
            kinds,
            _shapes(grads),
            self._op.value,
            -1,
            1.0 / self._predivide,
            self._predivide,
            device,
        )
        return batch.request

    def _name(self, here: session.Session, batch: _Batch) -> str:
        """Two optimizers may name their parameters alike; the second one's get its number."""
        number = here.optimizer_number(self, self._process_set)
        return f"gradient.{batch.name}" if number == 0 else f"gradient.{number}.{batch.name}"

    def _put_back(self, grads: Sequence[torch.Tensor], pairs: Sequence[tuple[Any, Any]]) -> None:
        for grad, (small, context) in zip(grads, pairs, strict=True):
            grad.copy_(self._compression.decompress(small, context))

    def _send_sparse(self, here: session.Session, batch: _Batch) -> _Flight:
        """One by one, and as they are: gathering is all that can be done with sparse ones."""
        finishes: list[tuple[torch.Tensor, Callable[[], torch.Tensor]]] = []
        for index, p in enumerate(batch.params):
            grad = p.grad
            assert grad is not None
            name = f"{self._name(here, batch)}.{index}"
            reduce = sparse_allreduce_async if grad.is_sparse else allreduce_async_
            handle: Any = reduce(grad, name=name, op=self._op, process_set=self._process_set)
            finishes.append((p, handle if grad.is_sparse else handle.wait))

        def finish() -> None:
            for p, waits in finishes:
                p.grad = waits()

        return _Flight(None, None, [finish])


def _shapes(tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in tensors)


def _tell(gradients: weakref.ref[Gradients], batch: _Batch, p: torch.Tensor) -> None:
    found = gradients()
    if found is not None:
        found._made(batch, p)


def _remove(hooks: Sequence[Any]) -> None:
    for hook in hooks:
        hook.remove()

"""A call on shares: shards in threads of their own, each with its rows of the batch.

What shards have found is put together: their rows, and the sums of their gradients. A tensor that
every shard has whole must be the same on all of them. Shards in threads share one generator of
random numbers. So one of them runs at a time, until it waits for another, and each has its own
random state, as shards in processes have: at first they are the same.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from farandole.layout.shards.batch_shard import BatchShard, SampleRange, sample_range
from farandole.layout.shards.table import batch_functions
from farandole.layout.tiles.core.flow import Flow
from farandole.layout.tiles.core.full_tensor import compute_replicated
from farandole.layout.tiles.core.grid import Grid
from farandole.layout.tiles.core.snapshot import plain
from tests.layout.oracle.calls import Found, arguments_of, gradients_for
from tests.layout.oracle.database import Given, is_batch
from tests.layout.tiles.checks import SEED, TABLE, ApartShards, Mailboxes

SHARDS = 2
ROW_TABLE = batch_functions()
_POOL = ThreadPoolExecutor(SHARDS)  # of all calls, one after the other


class _LeftAloneError(Exception):
    """Another shard has failed, and will send nothing."""


class _Boxes(Mailboxes):
    failed = False

    def __init__(self) -> None:
        super().__init__()
        self._turn = threading.Lock()

    @contextmanager
    def turns(self) -> Iterator[None]:
        """Inside, other shards run only while this one waits for them."""
        with self._turn:
            torch.manual_seed(SEED)
            yield

    def fail(self) -> None:
        with self._changed:
            self.failed = True
            self._changed.notify_all()

    def get(self, key: tuple[int, int, int, bool]) -> list[Tensor]:
        state = torch.get_rng_state()
        self._turn.release()
        try:
            with self._changed:
                self._changed.wait_for(lambda: key in self._letters or self.failed, timeout=20)
        finally:
            self._turn.acquire()
            torch.set_rng_state(state)
        with self._changed:
            if key not in self._letters:
                raise _LeftAloneError(str(key))
            return self._letters.pop(key)


class _End(NamedTuple):
    """What one shard has after the call."""

    results: list[Any]
    gradients: list[Tensor | None]
    after: list[Tensor]
    whole: list[str]


class Shares(NamedTuple):
    together: bool = False  # whether all tensors that may be batches are shares
    name: str = "shares"

    def __call__(self, call: Callable[..., Any], given: Given) -> Found:
        boxes = _Boxes()
        errors: list[Exception] = []

        def run(shard: int) -> _End | None:
            try:
                with boxes.turns():
                    return self._on(shard, boxes, call, given)
            except Exception as error:
                errors.append(error)
                boxes.fail()
                return None

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ends = list(_POOL.map(run, range(SHARDS)))
        for error in errors:
            if not isinstance(error, _LeftAloneError):
                raise error
        return _put_together([end for end in ends if end is not None])

    def _on(self, shard: int, boxes: _Boxes, call: Callable[..., Any], given: Given) -> _End:
        whole: list[str] = []

        def otherwise(flow: Flow, function: Any, args: Any, kwargs: Any) -> Any:
            whole.append(str(getattr(function, "__name__", function)))
            return compute_replicated(flow, function, args, kwargs)

        shards = ApartShards(Grid((SHARDS,)), shard, boxes)
        flow = Flow(shards, TABLE, otherwise, ROW_TABLE)
        flow.layer = "the layer"
        leaves, arguments, fill = arguments_of(given)
        samples = arguments[0].shape[0]
        share = sample_range(shard, SHARDS, samples)
        for at, each in enumerate(arguments):
            if at == 0 or (self.together and is_batch(each) and each.shape[0] == samples):
                own = each[share.rows.start : share.rows.stop].clone()
                arguments[at] = BatchShard(flow, own, samples)
        args, kwargs = fill(arguments)
        results = [_bare(each) for each in pytree.tree_leaves(call(*args, **kwargs))]
        _backward(results, share, samples)
        return _End(results, [leaf.grad for leaf in leaves], arguments, whole)


def _bare(leaf: Any) -> Any:
    return plain(leaf) if isinstance(leaf, Tensor) else leaf


def _backward(results: Sequence[Any], share: SampleRange, samples: int) -> None:
    """Shards' losses add up: of its rows a shard's counts whole, of what all have by its share."""
    differentiable = [each for each in results if isinstance(each, Tensor) and each.requires_grad]
    weight = 0.0 if share.spare else 1.0
    own, gradients = [], []
    for each, gradient in zip(differentiable, gradients_for(differentiable), strict=True):
        if isinstance(each, BatchShard):
            own.append(each.own)
            gradients.append(each.spans.here(gradient) * weight)
        else:
            own.append(each)
            gradients.append(gradient * (weight * len(share.rows) / samples))
    if own:
        torch.autograd.backward(own, gradients)


def _put_together(ends: Sequence[_End]) -> Found:
    gradients = [
        None if all(each is None for each in column) else sum(e for e in column if e is not None)
        for column in zip(*(end.gradients for end in ends), strict=True)
    ]
    return Found(
        [_joined(column) for column in zip(*(end.results for end in ends), strict=True)],
        gradients,
        [_joined(column) for column in zip(*(end.after for end in ends), strict=True)],
        ends[0].whole,
    )


def _joined(column: Sequence[Any]) -> Any:
    first = column[0]
    assert all(type(each) is type(first) for each in column), [type(each) for each in column]
    if isinstance(first, BatchShard):
        result = torch.cat([each.own for each in column if not each.spans.own_range.spare])
        assert result.shape == first.shape, f"rows of {first.shape} are in truth {result.shape}"
        return result
    if isinstance(first, Tensor):
        torch.testing.assert_close(list(column), [first] * len(column), equal_nan=True)
    return first

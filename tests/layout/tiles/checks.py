"""The same model on tiles and without: outputs, all gradients and all buffers must be equal.

All shards are in this process (`LocalShards`), in double precision. A layer that was handed off to
whole samples is right for the wrong reason, so it must be said where that is expected.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import strategies as st
from torch import Tensor, nn

from farandole.layout.shards.batch_shard import BatchShard, SampleRange, sample_range
from farandole.layout.tiles.core.flow import Flow, Handler
from farandole.layout.tiles.core.grid import Axes, Grid
from farandole.layout.tiles.core.handoff import hand_off
from farandole.layout.tiles.core.shard_group import LocalShards, ShardGroup
from farandole.layout.tiles.core.table import functions
from farandole.layout.tiles.core.tile import Tile, cut
from farandole.layout.tiles.core.tiling import Tiling

TOLERANCE = 1e-10
TABLE = functions()
SEED = 5

grids = st.sampled_from([(1, 2), (2, 1), (2, 2), (1, 3), (3, 2), (3, 3)])
channel_parts = st.sampled_from([1, 1, 2, 3])


def numbers(*shape: int, seed: int = 1) -> Tensor:
    """Of a generator of their own, so that a failure can be seen again."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def made(build: Callable[[], nn.Module]) -> nn.Module:
    """A layer in double precision, always with the same weights; none of them is zero or one."""
    module = build().double()
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.randn(weight.shape, dtype=torch.float64, generator=generator))
    return module


def flow_of(
    grid: Sequence[int], channels: int = 1, table: Mapping[Any, Handler] = TABLE, margin: int = 0
) -> tuple[Flow, list[str]]:
    """A flow of local shards, and the names of what it will have handed off."""
    handed_off: list[str] = []

    def otherwise(flow: Flow, function: Any, args: Any, kwargs: Any) -> Any:
        handed_off.append(getattr(function, "__name__", str(function)))
        args, kwargs = pytree.tree_map_only(Tile, lambda t: hand_off(flow, t), (args, kwargs))
        return function(*args, **kwargs)

    flow = Flow(LocalShards(Grid(grid, channels)), table, otherwise)
    if margin:
        flow.margins = [((0, 0), *((margin, margin),) * len(grid))] * 20
    return flow, handed_off


def whole(value: Any) -> list[Tensor]:
    """The tensors of a result, put together."""
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return [hand_off(leaf.flow, leaf) if isinstance(leaf, Tile) else leaf for leaf in leaves]


def check(
    model: Callable[..., Any],
    inputs: Tensor | Sequence[Tensor],
    grid: Sequence[int],
    channels: int = 1,
    *,
    axes: Mapping[int, Axes] | None = None,
    hands_off: bool = False,
    margin: int = 0,
    table: Mapping[Any, Handler] = TABLE,
    tolerance: float = TOLERANCE,
) -> None:
    """Asserts that a model, or a function of tensors, gives the same on tiles as without.

    Inputs with an image are cut, and all others are whole on every shard, unless `axes` says of
    one, by its number, what divides it. `hands_off`: something in it is not computed on tiles.
    `margin`: layers with windows compute as much beyond what a shard owns.
    """
    given = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    flow, handed_off = flow_of(grid, channels, table, margin)
    division: dict[int, Axes] = {
        index: flow.grid.image_axes
        for index, each in enumerate(given)
        if each.dim() == len(grid) + 2
    } | dict(axes or {})

    def run(on_tiles: bool) -> tuple[list[Tensor], list[Tensor | None], list[Tensor]]:
        own = copy.deepcopy(model)
        leaves = [each.clone().requires_grad_(each.is_floating_point()) for each in given]
        arguments: list[Tensor] = [each * 1 for each in leaves]  # layers may change them in place
        if on_tiles:
            for index, each in division.items():
                arguments[index] = cut(flow, arguments[index], each)
        torch.manual_seed(SEED)
        results = whole(own(*arguments))
        differentiable = [each for each in results if each.requires_grad]
        torch.autograd.backward(
            differentiable,
            [numbers(*each.shape, seed=at) for at, each in enumerate(differentiable, start=7)],
        )
        weights = list(own.parameters()) if isinstance(own, nn.Module) else []
        buffers = list(own.buffers()) if isinstance(own, nn.Module) else []
        return results, [each.grad for each in (*leaves, *weights)], buffers

    with torch.enable_grad():
        plain, plain_gradients, plain_buffers = run(on_tiles=False)
        tiled, gradients, buffers = run(on_tiles=True)
    assert bool(handed_off) == hands_off, f"handed off: {handed_off}"
    assert len(plain) == len(tiled)
    for found, true in zip((*tiled, *buffers), (*plain, *plain_buffers), strict=True):
        _assert_equal(found, true, 0.0, tolerance)
    # A gradient that is zero but for rounding is compared with the others.
    largest = max((_largest(each) for each in plain_gradients if each is not None), default=0.0)
    for gradient, expected in zip(gradients, plain_gradients, strict=True):
        assert (gradient is None) == (expected is None)
        if gradient is not None and expected is not None:
            _assert_equal(gradient, expected, 1e-3 * largest, tolerance)


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _assert_equal(found: Tensor, true: Tensor, least: float, tolerance: float) -> None:
    assert found.shape == true.shape
    assert found.dtype == true.dtype
    if not true.is_floating_point():
        assert torch.equal(found, true)
    elif true.numel():
        error = _largest(found - true) / max(_largest(true), least, 1e-30)
        assert error <= tolerance, f"a relative error of {error:.1e}"


class Mailboxes:
    """What shards in threads have sent each other."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._letters: dict[tuple[int, int, int, bool], list[Tensor]] = {}

    def put(self, key: tuple[int, int, int, bool], tensors: list[Tensor]) -> None:
        with self._changed:
            assert key not in self._letters
            self._letters[key] = tensors
            self._changed.notify_all()

    def get(self, key: tuple[int, int, int, bool]) -> list[Tensor]:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._letters, timeout=150), key
            return self._letters.pop(key)


class ApartShards(ShardGroup):
    """One shard, in a thread of its own: it has nothing of the others but what they send."""

    def __init__(self, grid: Grid, shard: int, boxes: Mailboxes) -> None:
        super().__init__(grid, [shard])
        self._boxes = boxes

    def post(self, shard: int, number: int, back: bool, tensors: Sequence[Tensor]) -> None:
        copied = [tensor.detach().clone() for tensor in tensors]
        self._boxes.put((self.mine[0], shard, number, back), copied)

    def take(self, shard: int, number: int, back: bool) -> list[Tensor]:
        return self._boxes.get((shard, self.mine[0], number, back))


def check_apart(model: nn.Module, images: Tensor, grid: Sequence[int], channels: int = 1) -> None:
    """As `check`, with every shard on its own: gradients of weights are summed over shards, and
    each shard hands off its share of the samples. Nothing in the model may draw random numbers."""
    plain = copy.deepcopy(model)
    leaf = images.clone().requires_grad_()
    result = plain(leaf)
    gradient = numbers(*result.shape, seed=7)
    result.backward(gradient)
    whole_grid, boxes = Grid(grid, channels), Mailboxes()

    def run(shard: int) -> tuple[Tensor, list[Tensor], Tensor, SampleRange]:
        shards = ApartShards(whole_grid, shard, boxes)
        flow = Flow(shards, TABLE, lambda *_: pytest.fail("handed off too soon"))
        own = copy.deepcopy(model)
        own_leaf = images.clone().requires_grad_()
        found = own(cut(flow, own_leaf, whole_grid.image_axes))
        handed_off = hand_off(flow, found)
        assert isinstance(handed_off, BatchShard)
        samples = handed_off.own
        share = sample_range(shard, whole_grid.shards, len(images))
        rows = slice(share.rows.start, share.rows.stop)
        samples.backward(gradient[rows] * (0.0 if share.spare else 1.0))
        gradients = [torch.zeros_like(w) if w.grad is None else w.grad for w in own.parameters()]
        assert own_leaf.grad is not None
        for buffer, true in zip(own.buffers(), plain.buffers(), strict=True):
            _assert_equal(buffer, true, 0.0, TOLERANCE)
        return samples.detach(), gradients, own_leaf.grad, share

    with ThreadPoolExecutor(whole_grid.shards) as pool:
        ends = list(pool.map(run, range(whole_grid.shards)))
    for samples, _, _, share in ends:
        _assert_equal(samples, result[share.rows.start : share.rows.stop], 0.0, TOLERANCE)
    assert leaf.grad is not None
    largest = _largest(leaf.grad)
    _assert_equal(sum(end[2] for end in ends), leaf.grad, 0.0, TOLERANCE)
    for at, weight in enumerate(plain.parameters()):
        assert weight.grad is not None
        _assert_equal(sum(end[1][at] for end in ends), weight.grad, 1e-3 * largest, TOLERANCE)


def check_trained_apart(
    model: nn.Module,
    images: Tensor,
    target: Tensor,
    loss: Callable[[Any, Tensor], Tensor],
    grid: Sequence[int],
    channels: int = 1,
) -> list[Tiling]:
    """As `check_apart`, with the whole of a stage: hand-offs, the loss, and predictions. Returns
    the shards' tilings, which know where tiles have ended."""
    plain = copy.deepcopy(model)
    leaf = images.clone().requires_grad_()
    expected = loss(plain(leaf), target)
    expected.backward()
    with torch.no_grad():
        predicted = pytree.tree_leaves(copy.deepcopy(model).eval()(images))
    whole_grid, boxes = Grid(grid, channels), Mailboxes()

    def run(shard: int) -> tuple[Tensor, nn.Module, Tensor, Tiling]:
        own = copy.deepcopy(model)
        layers = {module: name for name, module in own.named_modules() if name}
        tiling = Tiling(ApartShards(whole_grid, shard, boxes), layers)
        with torch.no_grad():
            found = tiling.predict(
                copy.deepcopy(own).eval(), tiling.cut(images), len(images), last=True
            )
        for one, other in zip(pytree.tree_leaves(found), predicted, strict=True):
            _assert_equal(one, other, 0.0, TOLERANCE)
        own_leaf = images.clone().requires_grad_()
        value = tiling.loss(own, tiling.cut(own_leaf), len(images), loss, target)
        value.backward()
        for buffer, true in zip(own.buffers(), plain.buffers(), strict=True):
            _assert_equal(buffer, true, 0.0, TOLERANCE)
        assert own_leaf.grad is not None
        return value.detach(), own, own_leaf.grad, tiling

    with ThreadPoolExecutor(whole_grid.shards) as pool:
        ends = list(pool.map(run, range(whole_grid.shards)))
    _assert_equal(sum(end[0] for end in ends), expected.detach(), 0.0, TOLERANCE)
    assert leaf.grad is not None
    largest = _largest(leaf.grad)
    _assert_equal(sum(end[2] for end in ends), leaf.grad, 0.0, TOLERANCE)
    for name, weight in plain.named_parameters():
        found = [end[1].get_parameter(name).grad for end in ends]
        assert all((each is None) == (weight.grad is None) for each in found), name
        if weight.grad is not None:
            total = sum(each for each in found if each is not None)
            assert isinstance(total, Tensor)
            _assert_equal(total, weight.grad, 1e-3 * largest, TOLERANCE)
    return [end[3] for end in ends]

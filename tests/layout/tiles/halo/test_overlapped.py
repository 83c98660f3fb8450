"""Convolutions on tiles: exact, computed while their halos travel, with one copy of their input."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from queue import Queue
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from farandole.layout.tiles.core.flow import Flow
from farandole.layout.tiles.core.grid import Box, Grid, Margin
from farandole.layout.tiles.core.intervals import Interval, Window, owned_interval
from farandole.layout.tiles.core.shard_group import LocalShards, ShardGroup
from farandole.layout.tiles.core.tile import Tile
from farandole.layout.tiles.halo import borders
from farandole.layout.tiles.halo.borders import InputPart, around, interior, slab_of
from farandole.layout.tiles.halo.exchange import slices
from farandole.layout.tiles.ops.convolution import conv
from farandole.layout.tiles.ops.kernels import Kernel

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
HANDLERS = {F.conv2d: partial(conv, 2)}
PATIENCE_SECONDS = 150.0
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


class Post:
    """Where shards on threads leave what they send each other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._boxes: dict[Any, Queue[list[torch.Tensor]]] = {}

    def box(self, *label: Any) -> Queue[list[torch.Tensor]]:
        with self._lock:
            return self._boxes.setdefault(label, Queue())

    @property
    def is_empty(self) -> bool:
        return all(box.empty() for box in self._boxes.values())


class ThreadShards(ShardGroup):
    """One shard here, each of the others on a thread of its own. Notes what happens, in order."""

    def __init__(self, grid: Grid, shard: int, post: Post) -> None:
        super().__init__(grid, [shard])
        self._post = post
        self.events: list[str] = []

    def post(self, shard: int, number: int, back: bool, tensors: Sequence[torch.Tensor]) -> None:
        self.events.append("post")
        self._post.box(self.mine[0], shard, number, back).put(list(tensors))

    def take(self, shard: int, number: int, back: bool) -> list[torch.Tensor]:
        self.events.append("take")
        return self._post.box(shard, self.mine[0], number, back).get(timeout=PATIENCE_SECONDS)


def on_threads(grid: Grid, work: Callable[[ThreadShards], Any]) -> list[Any]:
    """What every shard returns."""
    post, results, errors = Post(), [None] * grid.shards, []

    def run(shard: int) -> None:
        try:
            results[shard] = work(ThreadShards(grid, shard, post))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(shard,)) for shard in range(grid.shards)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert post.is_empty, "something was sent that nobody took"
    return results


@dataclass
class Case:
    """A convolution of a whole image, and how it is divided."""

    grid: Grid
    channels: tuple[int, int]
    sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    options: dict[str, Any]
    bias: bool = True
    batch: int = 2
    margin: Margin | None = None  # of the input
    wider: Margin | None = None  # of the output
    for_input: bool = True
    dtype: torch.dtype = torch.float64
    overlap: bool = True
    x: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(1)
        inputs, outputs = self.channels
        groups = self.options.get("groups", 1)

        def some(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random, dtype=torch.float64).to(self.dtype)

        self.x = some(self.batch, inputs, *self.sizes)
        self.weight = some(outputs, inputs // groups, *self.kernel)
        self.shift = some(outputs) if self.bias else None
        self.run = CONV[len(self.sizes)]

    def flow(self, shards: ShardGroup) -> Flow:
        handler = partial(conv, len(self.sizes))
        flow = Flow(shards, {self.run: handler}, lambda flow, func, *_: pytest.fail(str(func)))
        flow.margins = () if self.wider is None else (self.wider,)
        flow.overlap = self.overlap
        return flow


@dataclass
class Gradients:
    """What is found: of the shards here, or of the whole."""

    outputs: list[tuple[Box, torch.Tensor]]
    gradients: list[tuple[Box, torch.Tensor]]
    of_outputs: list[tuple[Box, torch.Tensor]]
    weight: torch.Tensor
    bias: torch.Tensor | None


def on_shards(case: Case, shards: ShardGroup) -> Gradients:
    flow = case.flow(shards)
    grid, axes = flow.grid, flow.grid.image_axes
    weight = case.weight.clone().requires_grad_()
    bias = None if case.shift is None else case.shift.clone().requires_grad_()
    sizes = tuple(case.x.shape[1:])
    margin = case.margin or ((0, 0),) * len(sizes)
    held = [grid.held(shard, sizes, axes, margin) for shard in shards.mine]
    pieces = [case.x[slices(box)].clone().requires_grad_(case.for_input) for box in held]
    result: Any = case.run(Tile(flow, pieces, sizes, axes, margin), weight, bias, **case.options)
    boxes = [result.held(shard) for shard in shards.mine]
    random = [torch.Generator().manual_seed(shard) for shard in shards.mine]
    given = [
        torch.randn(piece.shape, generator=each, dtype=torch.float64).to(piece.dtype)
        for piece, each in zip(result.pieces, random, strict=True)
    ]
    torch.autograd.backward(result.pieces, given)
    outputs = [piece.detach() for piece in result.pieces]
    gradients = [piece.grad for piece in pieces] if case.for_input else []
    assert weight.grad is not None
    return Gradients(
        list(zip(boxes, outputs, strict=True)),
        list(zip(held, gradients, strict=bool(gradients))) if gradients else [],
        list(zip(boxes, given, strict=True)),
        weight.grad,
        None if bias is None else bias.grad,
    )


def check(case: Case, found: Sequence[Gradients], tolerance: float = 1e-10) -> None:
    """Against the whole image in one process."""
    x = case.x.clone().requires_grad_()
    weight = case.weight.clone().requires_grad_()
    bias = None if case.shift is None else case.shift.clone().requires_grad_()
    expected = case.run(x, weight, bias, **case.options)
    total = torch.zeros_like(expected)
    for each in found:
        for box, output in each.outputs:
            close(output, expected[slices(box)], tolerance, expected)
        for box, gradient in each.of_outputs:
            total[slices(box)] += gradient
    expected.backward(total)
    assert x.grad is not None
    assert weight.grad is not None
    if case.for_input:
        of_input = torch.zeros_like(x)
        for each in found:
            for box, gradient in each.gradients:
                of_input[slices(box)] += gradient
        close(of_input, x.grad, tolerance, x.grad)
    close(sum(each.weight for each in found), weight.grad, tolerance, weight.grad)
    if bias is not None:
        close(sum(each.bias for each in found), bias.grad, tolerance, bias.grad)


def close(found: Any, expected: Any, tolerance: float, scale: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    if found.numel():
        error = (found - expected).abs().max() / scale.abs().max().clamp(min=1e-6)
        assert error <= tolerance, float(error)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    axes = draw(st.sampled_from([1, 2, 2, 2, 3]))
    most = {1: 4, 2: 3, 3: 2}[axes]

    def some(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(axes))

    grid = Grid(some(1, most), draw(st.sampled_from([1, 1, 2, 3])))
    groups = draw(st.sampled_from([1, 1, 2]))
    kernel, dilation, sizes = some(1, 4), some(1, 2), some(1, 14 if axes < 3 else 6)
    padding: Any = draw(st.sampled_from(["some", "some", "same"]))
    stride = some(1, 3) if padding == "some" else 1
    padding = some(0, 3) if padding == "some" else padding
    for axis in range(axes):
        both = 0 if padding == "same" else 2 * padding[axis]
        room = sizes[axis] + both - dilation[axis] * (kernel[axis] - 1) - 1
        assume(padding == "same" or room >= 0)
    margins = st.none() | st.tuples(
        st.just((0, 0)), *[st.tuples(st.integers(0, 2), st.integers(0, 2)) for _ in range(axes)]
    )
    return Case(
        grid,
        (draw(st.sampled_from([2, 4, 6])), draw(st.sampled_from([2, 4, 6]))),
        sizes,
        kernel,
        {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups},
        bias=draw(st.booleans()),
        margin=draw(margins),
        wider=draw(margins),
        for_input=draw(st.integers(0, 4)) > 0,
    )


@given(cases())
@settings(max_examples=30)
def test_all_shards_in_one_process_give_what_the_whole_image_gives(case: Case) -> None:
    check(case, [on_shards(case, LocalShards(case.grid))])


@given(cases())
@settings(max_examples=30)
def test_shards_on_threads_that_overlap_give_what_the_whole_image_gives(case: Case) -> None:
    with mock.patch.object(borders, "_LEAST_INTERIOR", 0.0):
        check(case, on_threads(case.grid, lambda shards: on_shards(case, shards)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("overlap", [True, False])
def test_every_precision(dtype: torch.dtype, overlap: bool) -> None:
    options = {"padding": 1}
    case = Case(Grid((2, 2)), (3, 4), (40, 38), (3, 3), options, dtype=dtype, overlap=overlap)
    found = on_threads(case.grid, lambda shards: on_shards(case, shards))
    check(case, found, tolerance=32 * torch.finfo(dtype).eps)


def noted(name: str, where: threading.local) -> Any:
    """A patch of one of `Kernel`'s methods, which then says when it is called, and on what."""
    plain = getattr(Kernel, name)

    def method(self: Kernel, *args: Any, **kwargs: Any) -> Any:
        where.events.append(name)
        return plain(self, *args, **kwargs)

    return mock.patch.object(Kernel, name, method)


def events_of(case: Case) -> list[str]:
    """What happens on the first shard, in order."""
    where = threading.local()

    def work(shards: ThreadShards) -> list[str]:
        where.events = shards.events
        on_shards(case, shards)
        return shards.events

    with (
        noted("outputs", where),
        noted("input_gradient", where),
        noted("weight_gradient", where),
    ):
        events: list[str] = on_threads(case.grid, work)[0]
    return events


def test_the_tile_is_convolved_while_the_halo_is_on_the_way() -> None:
    case = Case(Grid((2, 1)), (2, 2), (40, 9), (3, 3), {"padding": 1})
    forward = ["post", "outputs", "take", "outputs"]  # the second is the border's only strip
    backward = ["input_gradient", "post", "weight_gradient", "take"]
    assert events_of(case) == forward + backward


def test_a_large_border_is_not_computed_twice() -> None:
    case = Case(Grid((2, 1)), (2, 2), (6, 9), (3, 3), {"padding": 1})
    forward = ["post", "take", "outputs"]
    assert events_of(case) == [*forward, "input_gradient", "post", "weight_gradient", "take"]


def test_an_input_without_gradient_sends_nothing_back() -> None:
    case = Case(Grid((2, 1)), (2, 2), (40, 9), (3, 3), {"padding": 1}, for_input=False)
    assert events_of(case) == ["post", "outputs", "take", "outputs", "weight_gradient"]


def test_what_looks_at_one_pixel_sends_nothing() -> None:
    case = Case(Grid((2, 1)), (2, 2), (40, 9), (1, 1), {})
    assert events_of(case) == ["outputs"]


def test_a_shard_without_pixels_takes_part() -> None:
    case = Case(Grid((3, 1)), (2, 2), (2, 5), (3, 3), {"padding": (2, 1)})
    assert [owned_interval(shard, 3, 2).length for shard in range(3)].count(
        0
    ) == 1  # of the input's rows
    check(case, on_threads(case.grid, lambda shards: on_shards(case, shards)))
    narrow = Case(Grid((3, 1)), (2, 2), (4, 5), (3, 3), {"padding": (0, 1)})
    assert narrow.sizes[0] - 2 == 2  # rows of the output
    check(narrow, on_threads(narrow.grid, lambda shards: on_shards(narrow, shards)))


@pytest.mark.parametrize("shards", [1, 2])
def test_autocast_does_what_it_does_without_tiles(shards: int) -> None:
    options = {"padding": 1}
    case = Case(Grid((shards, 1)), (2, 2), (40, 9), (3, 3), options, dtype=torch.float32)

    def work(each: ShardGroup) -> Gradients:
        with torch.autocast("cpu", torch.bfloat16):
            return on_shards(case, each)

    found = on_threads(case.grid, work)
    assert {piece.dtype for each in found for _, piece in each.outputs} == {torch.bfloat16}
    assert {each.weight.dtype for each in found} == {torch.float32}
    assert {piece.dtype for each in found for _, piece in each.gradients} == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        expected = case.run(case.x, case.weight, case.shift, **case.options)
    for each in found:
        for box, output in each.outputs:
            close(output, expected[slices(box)], 0.02, expected)


def saved(work: Callable[[], Any]) -> dict[int, int]:
    """Bytes saved for the backward pass, by where they lie."""
    found: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        kept = work()  # what is saved lives as long as the result
    del kept
    return found


def layers(x: torch.Tensor, weights: Sequence[torch.Tensor], between: Any) -> list[Any]:
    """Convolutions, and what lies between them."""
    results: list[Any] = [x]
    for weight in weights:
        results.append(F.conv2d(results[-1], weight, padding=1))
        results.append(between(results[-1]))
    return results


@pytest.mark.parametrize("overlap", [True, False])
def test_saved_are_the_tiles_themselves_and_thin_halos(overlap: bool) -> None:
    grid = Grid((2, 2))
    weights = [torch.randn(8, 8, 3, 3).requires_grad_() for _ in range(3)]
    x = torch.randn(1, 8, 96, 96)
    kernels = {weight.untyped_storage().data_ptr() for weight in weights}

    def bytes_of(found: dict[int, int]) -> int:
        return sum(size for place, size in found.items() if place not in kernels)

    def work(shards: ThreadShards) -> int:
        flow = Flow(shards, HANDLERS, lambda flow, func, *_: pytest.fail(str(func)))
        flow.overlap = overlap
        (shard,) = shards.mine
        box = grid.owned(shard, tuple(x.shape[1:]), grid.image_axes)
        piece = x[slices(box)].clone()
        tile = Tile(flow, [piece], x.shape[1:], grid.image_axes)
        made: list[Any] = []
        found = saved(lambda: made.extend(layers(tile, weights, lambda each: each.map(F.relu))))
        tiles = {each.pieces[0].untyped_storage().data_ptr() for each in made}
        halos = {place: size for place, size in found.items() if place not in tiles | kernels}
        assert sum(halos.values()) < 0.06 * bytes_of(found), "more than halos was saved beside them"
        assert piece.untyped_storage().data_ptr() in found
        return bytes_of(found)

    whole = bytes_of(saved(lambda: layers(x, weights, F.relu)))
    for size in on_threads(grid, work):
        assert size < 1.06 * whole / grid.shards


def test_a_frozen_weight_saves_no_input() -> None:
    grid = Grid((2, 1))
    flow = Flow(
        LocalShards(grid),
        {F.conv2d: partial(conv, 2)},
        lambda flow, func, *_: pytest.fail(str(func)),
    )
    weight = torch.randn(2, 2, 3, 3)
    pieces = [torch.randn(1, 2, 8, 8).requires_grad_() for _ in range(2)]
    tile = Tile(flow, pieces, (2, 16, 8), grid.image_axes)
    found = saved(lambda: F.conv2d(tile, weight, padding=1).pieces)  # type: ignore[attr-defined]
    assert set(found) == {weight.untyped_storage().data_ptr()}


windows = st.builds(
    Window,
    kernel=st.integers(1, 4),
    stride=st.integers(1, 4),
    before=st.integers(0, 3),
    after=st.integers(0, 3),
    dilation=st.integers(1, 3),
)


@given(windows, st.integers(0, 20), st.integers(0, 20))
def test_outputs_within_some_inputs(window: Window, start: int, length: int) -> None:
    inputs = Interval(start, start + length)
    found = window.within(inputs)
    for at in range(-10, 40):
        inside = inputs.covers(window.needs(Interval(at, at + 1)))
        assert inside == (found.start <= at < found.stop)


@given(windows, st.integers(1, 20), st.integers(1, 4), st.data())
def test_the_interior_looks_at_nothing_that_others_have(
    window: Window, size: int, parts: int, data: st.DataObject
) -> None:
    assume(size + window.before + window.after >= window.reach)
    shard = data.draw(st.integers(0, parts - 1))
    outputs = owned_interval(shard, parts, window.length(size))
    owned = owned_interval(shard, parts, size)
    assume(outputs.length)
    one = Interval(0, 1)
    found = interior(
        [window], (one, outputs), (one, window.needs(outputs)), (one, owned), (1, size)
    )
    for at in range(outputs.start, outputs.stop):
        looked_at = range(*window.needs(Interval(at, at + 1)))
        others = [each for each in looked_at if 0 <= each < size and each not in range(*owned)]
        if found[1].start <= at < found[1].stop:
            assert not others
        elif owned.length and window.dilation == 1:
            assert any(each not in range(*owned) for each in looked_at)


def test_the_edge_of_the_image_belongs_to_the_interior() -> None:
    one, rows, window = Interval(0, 1), Interval(0, 5), Window(3, 1, 1, 1)
    needed = window.needs(rows)
    found = interior([window], (one, rows), (one, needed), (one, rows), (1, 10))
    assert found == (one, Interval(0, 4))


def test_nothing_is_interior_where_others_have_channels() -> None:
    some, half = Interval(0, 4), Interval(0, 2)
    found = interior([Window(1)], (half, some), (some, some), (half, some), (4, 4))
    assert found == (Interval(0, 0), Interval(0, 0))


@given(st.lists(st.tuples(*[st.integers(0, 4)] * 3), min_size=1, max_size=3))
def test_strips_around_a_box_make_it_whole(lengths: list[tuple[int, int, int]]) -> None:
    outer = tuple(Interval(2, 2 + sum(each)) for each in lengths)
    inner = tuple(Interval(2 + before, 2 + before + middle) for before, middle, _ in lengths)
    found = [
        place
        for box in (inner, *around(outer, inner))
        for place in product(*(range(*interval) for interval in box))
    ]
    assert sorted(found) == sorted(product(*(range(*interval) for interval in outer)))


def test_zeros_on_both_sides_alike_are_left_to_torch() -> None:
    channels, rows = Interval(0, 4), Interval(0, 8)

    def slab(needed: Interval, *known: Interval) -> tuple[Interval, int]:
        bits = [InputPart(0, (channels, each), (channels, each)) for each in known]
        box, (padding,) = slab_of((channels, needed), bits)
        return box[1], padding

    assert slab(Interval(-2, 10), rows) == (rows, 2)
    assert slab(Interval(-1, 10), rows) == (Interval(0, 9), 1)
    assert slab(Interval(-1, 8), rows) == (Interval(-1, 8), 0)
    assert slab(Interval(-1, 13), rows, Interval(9, 12)) == (Interval(0, 12), 1)
    assert slab(Interval(20, 22), rows) == (Interval(20, 22), 0)

"""Fused halos: layers that share one wide exchange give what layers with an exchange each give,
and the groups that are chosen are the best under the model."""

from __future__ import annotations

import copy
import queue
import threading
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from farandole.errors import UserError
from farandole.layout.tiles.core.flow import Flow, Windowed
from farandole.layout.tiles.core.grid import Axes, Box, Grid
from farandole.layout.tiles.core.intervals import Window
from farandole.layout.tiles.core.shard_group import LocalShards, ShardGroup
from farandole.layout.tiles.core.table import functions
from farandole.layout.tiles.core.tile import Tile, cut
from farandole.layout.tiles.halo.exchange import slices
from farandole.layout.tiles.halo.fusing import (
    LayerGroups,
    choose_groups,
    cost_seconds,
    describe,
    fused,
    margins_for,
    plain,
)
from farandole.schedule import Link

SLOW = Link(1e-3, 1e-9)
FAST = Link(1e-9, 1e-15)


class Mailboxes:
    """Between shards in threads."""

    def __init__(self) -> None:
        self._boxes: dict[Any, queue.Queue[list[Tensor]]] = defaultdict(queue.Queue)
        self._lock = threading.Lock()

    def __getitem__(self, key: Any) -> queue.Queue[list[Tensor]]:
        with self._lock:  # or two shards would each make a box of their own
            return self._boxes[key]


class OneShard(ShardGroup):
    """One shard, which counts what it posts in the forward pass, by layer."""

    def __init__(self, grid: Grid, shard: int, boxes: Mailboxes) -> None:
        super().__init__(grid, [shard])
        self._boxes = boxes
        self.flow: Flow | None = None
        self.posted: list[str] = []

    def post(self, shard: int, number: int, back: bool, tensors: Sequence[Tensor]) -> None:
        assert self.flow is not None
        if not back:
            self.posted.append(self.flow.layer)
        here = self.mine[0]
        self._boxes[here, shard, number, back].put([tensor.detach() for tensor in tensors])

    def take(self, shard: int, number: int, back: bool) -> list[Tensor]:
        return self._boxes[shard, self.mine[0], number, back].get(timeout=150)


class Outcome(NamedTuple):
    """Of a forward and a backward pass."""

    output: Tensor
    gradient: Tensor
    weights: dict[str, Tensor]  # their gradients
    buffers: dict[str, Tensor]


def not_on_tiles(flow: Flow, function: Any, args: Any, kwargs: Any) -> Any:
    raise AssertionError(f"{flow.layer}: {function} is not computed on tiles")


def on_tiles(shards: ShardGroup, model: nn.Module, x: Tensor, margins: Any, record: bool) -> Tile:
    flow = Flow(shards, functions(), not_on_tiles)
    flow.margins = margins
    flow.record = [] if record else None
    if isinstance(shards, OneShard):
        shards.flow = flow
    hooks = []
    for name, module in model.named_modules():

        def enter(module: nn.Module, args: Any, name: str = name) -> None:
            flow.layer = name

        hooks.append(module.register_forward_pre_hook(enter))
    result = model(cut(flow, x, flow.grid.image_axes))
    for hook in hooks:
        hook.remove()
    assert isinstance(result, Tile)
    return result


def recorded(model: nn.Module, x: Tensor, grid: Grid) -> list[Windowed]:
    with torch.no_grad():
        result = on_tiles(LocalShards(grid), copy.deepcopy(model), x, (), True)
    assert result.flow.record is not None
    return result.flow.record


def whole(model: nn.Module, x: Tensor, weighting: Tensor) -> Outcome:
    model, x = copy.deepcopy(model), x.clone().requires_grad_()
    output = model(x)
    (output * weighting).sum().backward()
    return outcome(model, output, x)


def outcome(model: nn.Module, output: Tensor, x: Tensor) -> Outcome:
    assert x.grad is not None
    weights = {n: w.grad for n, w in model.named_parameters() if w.grad is not None}
    buffers = {name: buffer.double() for name, buffer in model.named_buffers()}
    return Outcome(output.detach(), x.grad, weights, buffers)


def tiled(
    shards: ShardGroup, model: nn.Module, x: Tensor, weighting: Tensor, margins: Any
) -> tuple[Outcome, Tile]:
    """What the shards here make of it; elsewhere the output is zero."""
    model, x = copy.deepcopy(model), x.clone().requires_grad_()
    result = on_tiles(shards, model, x, margins, False)
    output = torch.zeros_like(weighting)
    total = torch.zeros(())
    for shard, piece in zip(shards.mine, result.own_pieces(), strict=True):
        at = slices(result.owned(shard))
        output[at] = piece.detach()
        total = total + (piece * weighting[at]).sum()
    total.backward()
    return outcome(model, output, x), result


def added(outcomes: Sequence[Outcome]) -> Outcome:
    """All shards' parts. They have the same running statistics."""
    first = outcomes[0]
    for other in outcomes[1:]:
        for name, buffer in other.buffers.items():
            assert torch.equal(buffer, first.buffers[name])
    weights = {name: sum(each.weights[name] for each in outcomes) for name in first.weights}
    output = sum(each.output for each in outcomes)
    gradient = sum(each.gradient for each in outcomes)
    return Outcome(output, gradient, weights, first.buffers)  # type: ignore[arg-type]


def same(found: Outcome, expected: Outcome) -> None:
    def close(one: Tensor, other: Tensor, scale: float) -> None:
        assert (one - other).abs().max().item() <= 1e-10 * scale

    close(found.output, expected.output, expected.output.abs().max().item())
    close(found.gradient, expected.gradient, expected.gradient.abs().max().item())
    # A bias before BatchNorm has a gradient of zero: none is compared by its own size alone.
    largest = max((each.abs().max().item() for each in expected.weights.values()), default=1.0)
    assert found.weights.keys() == expected.weights.keys()
    for name, gradient in expected.weights.items():
        close(found.weights[name], gradient, largest)
    for name, buffer in expected.buffers.items():
        close(found.buffers[name], buffer, 1.0)


def exact_here(model: nn.Module, x: Tensor, grid: Grid, groups: LayerGroups) -> None:
    layers = recorded(model, x, grid)
    weighting = torch.randn_like(model(x)).detach()
    margins = margins_for(grid, layers, groups)
    found, _ = tiled(LocalShards(grid), model, x, weighting, margins)
    same(found, whole(model, x, weighting))


def exact_with_threads(
    model: nn.Module, x: Tensor, grid: Grid, groups: LayerGroups, layers: Sequence[Windowed]
) -> list[str]:
    """Returns the layers whose halos were sent, in order."""
    with torch.no_grad():
        weighting = torch.randn_like(copy.deepcopy(model)(x))
    margins, boxes = margins_for(grid, layers, groups), Mailboxes()
    shards = [OneShard(grid, shard, boxes) for shard in range(grid.shards)]
    with ThreadPoolExecutor(grid.shards) as pool:
        runs = [pool.submit(tiled, each, model, x, weighting, margins) for each in shards]
        same(added([run.result()[0] for run in runs]), whole(model, x, weighting))
    posted = {name for each in shards for name in each.posted}
    return [layer.layer for layer in layers if layer.layer in posted]


@pytest.fixture(autouse=True)
def _doubles() -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Bottleneck(nn.Module):
    """Normalises behind its convolutions, or before: then what is added is not what is read."""

    def __init__(self, channels: int, outputs: int, stride: int = 1, before: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels if before else outputs)
        self.inner = nn.BatchNorm2d(outputs)
        self.narrow = nn.Conv2d(channels, outputs, 1, bias=False)
        self.middle = nn.Conv2d(outputs, outputs, 3, stride, 1, bias=False)
        self.widen = nn.Conv2d(outputs, outputs, 1)
        changes = stride > 1 or channels != outputs
        self.beside = nn.Conv2d(channels, outputs, 1, stride) if changes else nn.Identity()
        self.before = before

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(x)) if self.before else x
        y = self.widen(self.middle(F.relu_(self.inner(self.narrow(y)))))
        if self.before:
            return y + self.beside(x)
        y = self.norm(y)
        y += self.beside(x)
        return F.relu(y)


class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.down = nn.MaxPool2d(2)
        self.deep = nn.Conv2d(4, 6, 3, padding=2, dilation=2)
        self.up = nn.ConvTranspose2d(6, 4, 2, 2)
        self.last = nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        return self.last(torch.cat([x, F.relu(self.up(F.relu(self.deep(self.down(x)))))], 1))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.first = nn.Conv2d(4, 3, 1)
        self.second = nn.Conv2d(3, 3, 5, padding=2)
        self.long = nn.Conv2d(4, 2, (1, 7), padding=(0, 3))
        self.pool = nn.AvgPool2d(3, 1, 1, count_include_pad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        return torch.cat([self.second(self.first(x)), self.long(x), self.pool(x)], 1)


def stack() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, stride=2, padding=1),
        nn.MaxPool2d(3, 1, 1),
        nn.ConvTranspose2d(4, 3, 3, 2, 1, 1),
        nn.Conv2d(3, 3, 3, padding=2, dilation=2),
    )


def blocks(before: bool) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        Bottleneck(4, 4, before=before),
        Bottleneck(4, 4, before=before),
        Bottleneck(4, 6, 2, before=before),
    )


MODELS = {
    "stack": stack,
    "blocks": lambda: blocks(before=False),
    "blocks, normalised before": lambda: blocks(before=True),
    "unet": Unet,
    "branches": Branches,
}


@pytest.mark.parametrize(
    ("name", "tiles"),
    [
        ("stack", (3, 3)),
        ("blocks", (2, 2)),
        ("blocks, normalised before", (3, 1)),
        ("unet", (3, 3)),
        ("branches", (2, 3)),
    ],
)
def test_one_exchange_for_a_whole_model(name: str, tiles: tuple[int, int]) -> None:
    model, x, grid = MODELS[name](), torch.randn(2, 3, 34, 30), Grid(tiles)
    layers = recorded(model, x, grid)
    asked = exact_with_threads(model, x, grid, [range(len(layers))], layers)
    assert asked == [layers[0].layer]
    assert len(exact_with_threads(model, x, grid, plain(layers), layers)) > 2


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (False, ["0", "1.narrow"]),
        (True, ["0", "1.narrow", "2.narrow"]),
    ],
)
def test_what_is_added_to_the_end_of_a_group_is_wide_if_its_first_layer_reads_it(
    before: bool, expected: list[str]
) -> None:
    """If not (it is normalised first), the layer behind the sum must ask."""
    model, x, grid = blocks(before)[:3], torch.randn(2, 3, 26, 22), Grid((2, 2))
    layers = recorded(model, x, grid)
    groups = [range(1), range(1, len(layers))]
    assert exact_with_threads(model, x, grid, groups, layers) == expected
    assert f" {len(expected)} exchanges for 7 layers" in describe(grid, layers, groups, SLOW)


def test_fused_layers_are_as_many_as_asked_for() -> None:
    model, x, grid = blocks(before=True)[:3], torch.randn(2, 3, 26, 22), Grid((2, 2))
    layers = recorded(model, x, grid)
    asked = exact_with_threads(model, x, grid, plain(layers), layers)
    assert asked == ["0", "1.middle", "2.middle"]
    assert fused(grid, layers, 1) == [range(2), range(2, 5), range(5, 7)]
    assert fused(grid, layers, 2) == [range(5), range(5, 7)]
    assert fused(grid, layers, 3) == [range(7)]
    asked = exact_with_threads(model, x, grid, fused(grid, layers, 2), layers)
    assert asked == ["0", "2.middle"]
    with pytest.raises(UserError, match="halo=0"):
        fused(grid, layers, 0)


def test_whoever_needs_others_channels_begins_a_group() -> None:
    model, x, grid = stack(), torch.randn(2, 3, 26, 22), Grid((2, 1), channels=2)
    layers = recorded(model, x, grid)
    groups = fused(grid, layers, 9)
    assert [layers[group[0]].layer for group in groups] == ["0", "3", "5", "6"]
    exact_here(model, x, grid, groups)
    exact_here(model, x, grid, [range(len(layers))])
    assert all(margin[0] == (0, 0) for margin in margins_for(grid, layers, [range(len(layers))]))


def test_margins_of_three_layers() -> None:
    layers = chain([Window(3, 1, 1, 1), Window(3, 2, 1, 1), Window(5, 1, 2, 2)], 32)
    grid = Grid((2,))
    # Of 16 outputs, shards own 8: shard 1 looks 2 before them. That is [6, 16), of which [11, 32)
    # is needed: 5 before what it owns. Shard 0 needs [0, 10), of which [0, 20): 4 behind.
    assert [margin[1] for margin in margins_for(grid, layers, [range(3)])] == [
        (5, 4),
        (2, 2),
        (0, 0),
    ]
    assert [margin[1] for margin in margins_for(grid, layers, [range(2), range(2, 3)])] == [
        (1, 0),
        (0, 0),
        (0, 0),
    ]
    assert margins_for(grid, layers, plain(layers)) == [((0, 0), (0, 0))] * 3


@st.composite
def stacks(draw: st.DrawFn) -> tuple[nn.Sequential, int]:
    """A model of some layers that look at windows, and how many they are."""
    parts: list[nn.Module] = []
    count = draw(st.integers(2, 5))
    for _ in range(count):
        kernel, dilation = draw(st.integers(1, 4)), draw(st.integers(1, 2))
        stride, padding = draw(st.sampled_from([1, 1, 2])), draw(st.integers(0, 2))
        kind = draw(st.sampled_from(["conv", "conv", "conv", "max", "average", "transposed"]))
        if kind == "conv":
            reach = dilation * (kernel - 1)
            parts.append(nn.Conv2d(3, 3, kernel, stride, max(padding, reach // 3), dilation))
        elif kind == "transposed":
            parts.append(nn.ConvTranspose2d(3, 3, kernel, stride, min(padding, kernel - 1)))
        elif kind == "max":
            parts.append(nn.MaxPool2d(kernel, 1, min(padding, kernel // 2)))
        else:
            parts.append(nn.AvgPool2d(kernel, 1, min(padding, kernel // 2)))
        if draw(st.booleans()):
            parts += [nn.BatchNorm2d(3), nn.ReLU(inplace=True)]
    return nn.Sequential(*parts), count


@settings(max_examples=30)
@given(
    stacks(),
    st.sets(st.integers(1, 4)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(15, 29), st.integers(15, 29)),
)
def test_any_groups_of_any_layers_are_exact(
    model: tuple[nn.Sequential, int],
    cuts: set[int],
    tiles: tuple[int, int],
    image: tuple[int, int],
) -> None:
    net, count = model
    x = torch.randn(2, 3, *image)
    try:
        with torch.no_grad():
            copy.deepcopy(net)(x)
    except (RuntimeError, ValueError):  # nothing is left of the image
        return
    bounds = [0, *sorted(cut for cut in cuts if cut < count), count]
    exact_here(net, x, Grid(tiles), [range(*each) for each in pairwise(bounds)])


def chain(windows: Sequence[Window], size: int, seconds: float = 1e-3) -> list[Windowed]:
    """Layers over one axis, each of which reads the one before."""
    layers: list[Windowed] = []
    axes: Axes = (None, 1)
    for number, window in enumerate(windows):

        def needs(box: Box, window: Window = window) -> Box:
            return box[0], window.needs(box[1])

        length = window.length(size)
        sources = frozenset([number - 1]) if number else frozenset[int]()
        layers.append(
            Windowed(
                f"conv{number}", (8, length), axes, (8, size), axes, needs, sources, 64, seconds
            )
        )
        size = length
    return layers


def all_groups(count: int) -> list[list[range]]:
    if not count:
        return [[]]
    return [
        [*before, range(first, count)] for first in range(count) for before in all_groups(first)
    ]


windows = st.builds(
    lambda kernel, stride: Window(kernel, stride, kernel // 2, kernel // 2),
    st.sampled_from([1, 3, 5, 7]),
    st.sampled_from([1, 1, 1, 2]),
)


@settings(max_examples=40)
@given(
    st.lists(windows, min_size=1, max_size=5),
    st.integers(2, 4),
    st.floats(1e-6, 1e-2),
    st.floats(1e-10, 1e-6),
)
def test_the_chosen_groups_are_the_best(
    layers: list[Window], parts: int, latency: float, per_byte: float
) -> None:
    met, grid, link = chain(layers, 200), Grid((parts,)), Link(latency, per_byte)
    costs = [cost_seconds(grid, met, groups, link) for groups in all_groups(len(met))]
    chosen = cost_seconds(grid, met, choose_groups(grid, met, link), link)
    assert chosen == pytest.approx(min(costs), rel=1e-12)
    assert chosen <= cost_seconds(grid, met, plain(met), link)


def test_slow_messages_are_saved_and_fast_ones_are_not() -> None:
    layers, grid = chain([Window(3, 1, 1, 1)] * 10, 400), Grid((4,))
    together = choose_groups(grid, layers, SLOW)
    assert 2 <= len(together) < 10
    assert max(map(len, together)) <= 8
    line = describe(grid, layers, together, SLOW)
    assert line.startswith(f"halos: {len(together)} exchanges for 10 layers (fused: conv0–")
    assert "saved of" in line
    # Every exchange is two messages, there and back, for the shards in the middle.
    assert cost_seconds(grid, layers, plain(layers), Link(1.0, 0.0)) == 10 * 2 * 2
    alone = choose_groups(grid, layers, FAST)
    assert alone == plain(layers)
    assert "fusing two layers each would cost" in describe(grid, layers, alone, FAST)
    assert "would save" in describe(grid, layers, alone, SLOW)


def test_layers_that_ask_nothing_have_nothing_to_fuse() -> None:
    layers, grid = chain([Window(1)] * 3, 40), Grid((2,))
    assert choose_groups(grid, layers, SLOW) == plain(layers)
    expected = "plain halos: 0 exchanges for 3 layers; there is nothing to fuse"
    assert describe(grid, layers, plain(layers), SLOW) == expected
    assert choose_groups(grid, [], SLOW) == fused(grid, [], 3) == []

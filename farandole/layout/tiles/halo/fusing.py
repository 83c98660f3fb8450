"""Fused halos: one wide exchange for several layers, where the cost model says that it pays.

    plain     exchange ─ conv ─ exchange ─ conv ─ exchange ─ conv
    fused     exchange ─ conv ────────── conv ────────── conv         one exchange, of a wide halo

A shard computes beyond what it owns, as far as the later layers of the group need it. These layers
then find their input complete and exchange nothing. Nothing is computed beyond the border of the
image: every layer adds its own padding there, so the result stays exact. Fusing saves messages and
costs overlapping computation, which pays for small messages over a slow network.

A bad plan costs time, never correctness: a layer that lacks part of its input asks for it as usual.

The model counts messages and bytes of halos alone. BatchNorm's statistics are exchanged as before,
and what is computed between windowed layers (activations and the like) counts nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from farandole.errors import UserError
from farandole.layout.tiles.core.flow import Windowed, no_margin
from farandole.layout.tiles.core.grid import Axes, Box, Grid, Margin, is_empty, widest
from farandole.layout.tiles.core.intervals import Interval, owned_interval
from farandole.layout.tiles.halo.windows import reach
from farandole.schedule import Link

LayerGroups = Sequence[Sequence[int]]
"""Numbers of consecutive layers that share an exchange; every layer is in one of them."""

MOST_LAYERS = 8  # in a group: the overlap grows with each
_EXCHANGES = 2  # of a halo in a step: values there, gradients back
_COMPUTATIONS = 3  # of a layer in a step, in forward passes: a backward pass takes two
_NAMED = 4  # groups, in a description


def margins_for(grid: Grid, layers: Sequence[Windowed], groups: LayerGroups) -> list[Margin]:
    """For `Flow.margins`: how far beyond what it owns each layer's output must be computed, so that
    inside a group no layer asks."""
    halos = _Halos(grid, layers)
    found: dict[int, Margin] = {}
    for group in groups:
        found |= halos.margins(group)
    return [found[number] for number in range(len(layers))]


def fused(grid: Grid, layers: Sequence[Windowed], every: int) -> list[range]:
    """One exchange for `every` layers that look beyond their tile, or for fewer: a layer that would
    have to ask even so (for others' channels, or for what comes from before the group) begins a
    new group."""
    if every < 1:
        raise UserError(f"halo={every}: a halo is exchanged for at least one layer.")
    halos = _Halos(grid, layers)
    asking = [bool(halos.asking([number])) for number in range(len(layers))]
    groups: list[range] = []
    first = 0
    for number in range(len(layers)):
        group = range(first, number + 1)
        if sum(asking[first : number + 1]) > every or len(halos.asking(group)) > 1:
            groups.append(range(first, number))
            first = number
    return [*groups, range(first, len(layers))] if layers else []


def choose_groups(grid: Grid, layers: Sequence[Windowed], link: Link) -> list[range]:
    """The groups with which a step is predicted to be shortest; in doubt, plain halos.

    Shards must choose alike: give all of them the same layers, with the same seconds.
    """
    halos = _Halos(grid, layers)
    best = [0.0]  # seconds of the layers up to each
    begins = [0]  # where the last group of these begins
    for stop in range(1, len(layers) + 1):
        costs = {
            first: best[first] + halos.seconds(range(first, stop), link)
            for first in range(stop - 1, max(-1, stop - 1 - MOST_LAYERS), -1)
        }
        # The group with one layer is first in `costs`, and `min` keeps the first of equals. So
        # plain halos win in doubt, on every shard alike.
        first = min(costs, key=costs.__getitem__)
        best.append(costs[first])
        begins.append(first)
    groups, stop = [], len(layers)
    while stop:
        groups.append(range(begins[stop], stop))
        stop = begins[stop]
    return groups[::-1]


def plain(layers: Sequence[Windowed]) -> list[range]:
    """Every layer for itself."""
    return [range(number, number + 1) for number in range(len(layers))]


def cost_seconds(grid: Grid, layers: Sequence[Windowed], groups: LayerGroups, link: Link) -> float:
    """What halos cost in a step: the exchanges, and what is computed twice."""
    return _Halos(grid, layers).total(groups, link)


def describe(grid: Grid, layers: Sequence[Windowed], groups: LayerGroups, link: Link) -> str:
    """A line for the log."""
    halos = _Halos(grid, layers)
    alone, chosen = ([halos.asking(group) for group in each] for each in (plain(layers), groups))
    exchanges = sum(map(len, chosen))
    count = f"{exchanges} exchange{'s' * (exchanges != 1)}"
    count += f" for {len(layers)} layer{'s' * (len(layers) != 1)}"
    before = halos.total(plain(layers), link)
    saving = [
        f"{layers[group[0]].layer}–{layers[group[-1]].layer}"
        for group, asking in zip(groups, chosen, strict=True)
        if len(asking) < sum(len(alone[number]) for number in group)
    ]
    if not saving:
        more = halos.total(fused(grid, layers, 2), link) - before
        if not more:
            return f"plain halos: {count}; there is nothing to fuse"
        effect = f"cost {_ms(more)} more" if more > 0 else f"save {_ms(-more)}"
        return f"plain halos: {count}; fusing two layers each would {effect} a step"
    named = ", ".join(saving[:_NAMED]) + " …" * (len(saving) > _NAMED)
    saved = before - halos.total(groups, link)
    effect = f"{_ms(saved)} saved" if saved >= 0 else f"{_ms(-saved)} lost"
    step = before + _COMPUTATIONS * sum(layer.seconds for layer in layers)
    return f"halos: {count} (fused: {named}), predicted {effect} of {_ms(step)} a step"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2g} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"


class _Halos:
    """What layers ask of other shards, if some of them share an exchange."""

    def __init__(self, grid: Grid, layers: Sequence[Windowed]) -> None:
        self._grid = grid
        self._layers = layers
        self._reaches: dict[tuple[int, Margin], Margin | None] = {}
        self._exchanges: dict[tuple[int, Margin], tuple[int, int]] = {}
        self._areas: dict[tuple[int, Margin], int] = {}

    def margins(self, group: Sequence[int]) -> dict[int, Margin]:
        """Of the outputs of a group's layers: from the last to the first, each has what its readers
        in the group need of it for their own."""
        margins = {number: no_margin(len(self._layers[number].axes)) for number in group}
        for number in reversed(group):
            # From the last layer to the first: a layer's own margin is known before it decides how
            # much of its input it needs.
            wide = self._reach(number, margins[number])
            if wide is None:
                continue
            for source in self._layers[number].sources & margins.keys():
                asked = self._of(self._layers[source].sizes, number, wide)
                margins[source] = widest(margins[source], asked)
        return margins

    def asking(self, group: Sequence[int]) -> list[int]:
        """The layers of a group that exchange anything."""
        return self._asking(self.margins(group))

    def _asking(self, margins: Mapping[int, Margin]) -> list[int]:
        widened: dict[int, Margin] = {}  # inputs that stay wide, by the layer that made them so
        asking = []
        for number, margin in margins.items():
            wide = self._reach(number, margin)
            if wide is not None and self._finds(number, wide, margins, widened):
                continue
            asking.append(number)
            if wide is not None and _any(margin):
                widened[number] = wide
        return asking

    def seconds(self, group: Sequence[int], link: Link) -> float:
        """In a step: of a group's exchanges, and of what its layers compute beyond their own."""
        margins = self.margins(group)
        result = 0.0
        for number in self._asking(margins):
            messages, volume = self._exchange(number, margins[number])
            once = messages * link.seconds_per_message + volume * link.seconds_per_byte
            result += _EXCHANGES * once
        for number, margin in margins.items():
            if not _any(margin):
                continue  # it computes nothing beyond its own
            more = self._area(number, margin) / self._area(number, no_margin(len(margin))) - 1
            result += _COMPUTATIONS * self._layers[number].seconds * more
        return result

    def total(self, groups: LayerGroups, link: Link) -> float:
        return sum(self.seconds(group, link) for group in groups)

    def _needed(self, number: int, margin: Margin) -> list[Box]:
        """By shard, of a layer's input, for an output with a margin."""
        layer, grid = self._layers[number], self._grid
        wanted = [grid.held(shard, layer.sizes, layer.axes, margin) for shard in range(grid.shards)]
        nothing = (Interval(0, 0),) * len(layer.input_axes)
        return [nothing if is_empty(box) else layer.needs(box) for box in wanted]

    def _reach(self, number: int, margin: Margin) -> Margin | None:
        """The margin that a layer's input must have; None: no margin is enough."""
        key = number, margin
        if key not in self._reaches:
            layer, needed = self._layers[number], self._needed(number, margin)
            self._reaches[key] = reach(self._grid, layer.input_sizes, layer.input_axes, needed)
        return self._reaches[key]

    def _of(self, sizes: Sequence[int], number: int, margin: Margin) -> Margin:
        """A margin of a layer's input, of a tensor that it was computed from. That may have been
        broadcast, and then was whole on every shard."""
        full = self._layers[number].input_sizes
        missing = len(full) - len(sizes)
        return tuple(
            sides if size == size_here else (0, 0)
            for sides, size, size_here in zip(margin[missing:], sizes, full[missing:], strict=True)
        )

    def _finds(
        self,
        number: int,
        wide: Margin,
        margins: Mapping[int, Margin],
        widened: Mapping[int, Margin],
    ) -> bool:
        """Whether a layer's input has a margin when the layer reads it."""
        if not _any(wide):
            return True
        sources = self._layers[number].sources
        inside = sources & margins.keys()
        read = [~source for source in sources if ~source in widened]
        before = {source for source in sources if source >= 0} - inside
        for other in read:
            before -= self._layers[other].sources
        # Sources from before the group have no margin, unless a reader inside the group has made
        # the tensor wide. If one such source is left, the layer has to ask.
        if before or not (inside or read):
            return False
        had = [(self._layers[source].sizes, margins[source]) for source in inside]
        had += [(self._layers[other].input_sizes, widened[other]) for other in read]
        return all(widest(margin, self._of(sizes, number, wide)) == margin for sizes, margin in had)

    def _exchange(self, number: int, margin: Margin) -> tuple[int, int]:
        """Of the shard that gets most: how many messages, and how many bytes."""
        key = number, margin
        if key not in self._exchanges:
            layer, grid = self._layers[number], self._grid
            sizes, axes = layer.input_sizes, layer.input_axes
            needed = self._needed(number, margin)
            wide = self._reach(number, margin)
            if wide is not None and _any(margin):  # the whole input is made wide
                needed = [grid.held(shard, sizes, axes, wide) for shard in range(grid.shards)]
            messages = values = 0
            for shard, box in enumerate(needed):
                inside = [
                    run.meets(Interval(0, size)) for run, size in zip(box, sizes, strict=True)
                ]
                mine = grid.owned(shard, sizes, axes)
                own = _volume([run.meets(has) for run, has in zip(inside, mine, strict=True)])
                values = max(values, _volume(inside) - own)
                messages = max(messages, self._owners(inside, sizes, axes) - (own > 0))
            self._exchanges[key] = messages, values * layer.position_bytes
        return self._exchanges[key]

    def _owners(self, box: Sequence[Interval], sizes: Sequence[int], axes: Axes) -> int:
        """How many shards a part of a tensor comes from."""
        count = 1
        for run, size, axis in zip(box, sizes, axes, strict=True):
            parts = 1 if axis is None else self._grid.parts[axis]
            count *= sum(
                owned_interval(index, parts, size).meets(run).length > 0 for index in range(parts)
            )
        return count

    def _area(self, number: int, margin: Margin) -> int:
        """Of the shard that computes most, as all wait for it."""
        key = number, margin
        if key not in self._areas:
            layer = self._layers[number]
            held = (
                self._grid.held(shard, layer.sizes, layer.axes, margin)
                for shard in range(self._grid.shards)
            )
            self._areas[key] = max(_volume(box) for box in held)
        return self._areas[key]


def _any(margin: Margin) -> bool:
    return any(before or after for before, after in margin)


def _volume(box: Sequence[Interval]) -> int:
    return math.prod(interval.length for interval in box)

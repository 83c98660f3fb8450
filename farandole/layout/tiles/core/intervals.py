"""Which rows a tile needs: interval arithmetic along one axis of an image. Pure, without torch.

    input     0 ─ ─ ─ ─ ─ a ━━━━━━━━━━ b ─ ─ ─ ─ size        a tile owns [a, b) of every tensor:
    output            oa ━━━━━ ob                            the same share, whatever its size
    needs       oa·s − p ━━━━━━━━━━━━━━━ (ob − 1)·s − p + d·(k − 1) + 1

A tile owns the same share of an axis of every tensor: `owned_interval(index, parts, size)`. Who
owns what follows from the size alone, so two branches that meet again always agree, and nothing but
the size has to be known about a tensor. What an output needs of its input follows from the layer.
It may begin before the image and end behind it: there the layer's padding is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from farandole.schedule import piece

_WORTH_SKIPPING = 8  # positions between two that are needed, from which on a gap is left out


class Interval(NamedTuple):
    """The positions from `start` up to, and without, `stop`."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return max(0, self.stop - self.start)

    def meets(self, other: Interval) -> Interval:
        """What both have; it may be empty."""
        start = max(self.start, other.start)
        return Interval(start, max(start, min(self.stop, other.stop)))

    def covers(self, other: Interval) -> bool:
        return other.length == 0 or (self.start <= other.start and other.stop <= self.stop)

    def moved(self, by: int) -> Interval:
        return Interval(self.start + by, self.stop + by)

    def grown(self, before: int, after: int, size: int) -> Interval:
        """Wider on both sides, but not beyond an axis of `size`. Nothing stays nothing."""
        if not self.length:
            return self
        return Interval(max(0, self.start - before), min(size, self.stop + after))

    @property
    def slice(self) -> slice:
        return slice(self.start, max(self.start, self.stop))


Runs = tuple[Interval, ...]
"""Positions of an axis that a tile needs, in order; without overlaps."""


def owned_interval(index: int, parts: int, size: int) -> Interval:
    """What part `index` of `parts` owns of an axis with `size` positions; may be empty."""
    owned = piece(index, parts, size)
    return Interval(owned.start, owned.stop)


class Window(NamedTuple):
    """A convolution or a pool: every output looks at `kernel` inputs."""

    kernel: int
    stride: int = 1
    before: int = 0  # padding
    after: int = 0
    dilation: int = 1

    @property
    def reach(self) -> int:
        return self.dilation * (self.kernel - 1) + 1

    def length(self, size: int, *, ceil: bool = False) -> int:
        """How many outputs there are. `ceil`: also where the window hangs over the end."""
        room = size + self.before + self.after - self.reach
        if not ceil:
            return room // self.stride + 1
        outputs = -(-room // self.stride) + 1
        # The last window must begin inside the image or the padding before it.
        return outputs - ((outputs - 1) * self.stride >= size + self.before)

    def needs(self, output: Interval) -> Interval:
        if not output.length:
            return Interval(0, 0)
        # Not clipped to the image: positions before 0 or behind the end are padding. Whoever puts
        # the input together fills them, so a border tile gets the same values as the whole image.
        first = output.start * self.stride - self.before
        last = (output.stop - 1) * self.stride - self.before
        return Interval(first, last + self.reach)

    def within(self, input: Interval) -> Interval:
        """The outputs that look at nothing but these inputs; may be none."""
        # The inverse of `needs`, rounded inwards: the start rounds up and the stop rounds down.
        # Invariant: `needs(within(x))` lies inside `x`. One output too many here would be computed
        # from a halo that has not arrived yet.
        first = -(-(input.start + self.before) // self.stride)
        last = (input.stop + self.before - self.reach) // self.stride
        return Interval(first, max(first, last + 1))


class TransposedWindow(NamedTuple):
    """A transposed convolution: every input is spread over `kernel` outputs."""

    kernel: int
    stride: int = 1
    padding: int = 0
    output_padding: int = 0
    dilation: int = 1

    def length(self, size: int) -> int:
        reach = self.dilation * (self.kernel - 1) + 1
        return (size - 1) * self.stride - 2 * self.padding + reach + self.output_padding

    def needs(self, output: Interval) -> Interval:
        """Every input that is spread to one of these outputs; may be none."""
        if not output.length:
            return Interval(0, 0)
        # Input i reaches the outputs from i·stride − padding to i·stride − padding + reach. Solved
        # for i, this gives the first input that still reaches `output.start` and the last one that
        # does not begin behind `output.stop − 1`.
        reach = self.dilation * (self.kernel - 1)
        first = -(-(output.start + self.padding - reach) // self.stride)
        last = (output.stop - 1 + self.padding) // self.stride
        return Interval(first, max(first, last + 1))

    def begins(self, first_input: int) -> int:
        """The first output that inputs from here on are spread to."""
        return first_input * self.stride - self.padding


class Cells(NamedTuple):
    """An adaptive pool: the axis is divided into `outputs` cells, which may overlap by one."""

    size: int
    outputs: int

    def cell(self, output: int) -> Interval:
        # Torch's own rounding. Where `outputs` does not divide `size`, neighbouring cells overlap,
        # and two shards may need the same input.
        start = output * self.size // self.outputs
        return Interval(start, -(-(output + 1) * self.size // self.outputs))

    def needs(self, output: Interval) -> Interval:
        if not output.length:
            return Interval(0, 0)
        return Interval(self.cell(output.start).start, self.cell(output.stop - 1).stop)


def runs(positions: Iterable[int]) -> Runs:
    """Single positions as few runs; a small gap is taken along."""
    ordered = sorted(set(positions))
    if not ordered:
        return (Interval(0, 0),)
    found = []
    start = last = ordered[0]
    for position in ordered[1:]:
        # Every run is a copy of its own, so a short gap is cheaper to send than to leave out.
        if position - last > _WORTH_SKIPPING:
            found.append(Interval(start, last + 1))
            start = position
        last = position
    return (*found, Interval(start, last + 1))


def place_in(wanted: Runs, position: int) -> int:
    """Where a position lies when the runs are put one after the other."""
    offset = 0
    for run in wanted:
        if run.start <= position < run.stop:
            return offset + position - run.start
        offset += run.length
    raise ValueError(f"{position} is in none of {wanted}")


def total(wanted: Sequence[Interval]) -> int:
    return sum(run.length for run in wanted)

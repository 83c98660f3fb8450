"""What of a convolution must wait for the halo, and what need not: boxes only.

┌───────────────┐
│ border        │    A shard's outputs. The interior looks at what the shard has, and beyond the
│   ┌───────────┤    edge of the image, where zeros are. The border, strips around it, looks at
│   │ interior  │    what others have too.
└───┴───────────┘    (a tile at the right and lower edges of the image)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from farandole.layout.tiles.core.grid import Box, is_empty, relative
from farandole.layout.tiles.core.intervals import Interval, Window
from farandole.layout.tiles.halo.exchange import slices
from farandole.layout.tiles.ops.kernels import Kernel

_LEAST_INTERIOR = 0.95  # of a shard's outputs: strips are slow for what they compute

Index = tuple[slice, ...]


class InputPart(NamedTuple):
    """Values that a shard has or gets: a box of the input, and where it lies."""

    tensor: int  # among the pieces of the shards here, then what came from elsewhere
    box: Box
    origin: Box  # all of that tensor


class Slab(NamedTuple):
    """A box of the input to be put together, and the zeros around it that torch adds itself."""

    box: Box
    padding: tuple[int, ...]


class SlabMove(NamedTuple):
    """A part of a tensor that belongs into a slab."""

    tensor: int
    there: Index  # in the tensor
    here: Index  # in the slab
    all_there: bool  # it is all of the tensor
    all_here: bool  # it is all of the slab


class Term(NamedTuple):
    """Outputs that are computed from some bits of the input, put together to a slab."""

    outputs: Index  # among the shard's
    channels: Interval  # of the output
    shape: tuple[int, ...]  # of the slab, without the batch
    padding: tuple[int, ...]
    moves: tuple[SlabMove, ...]
    has_gaps: bool  # zeros between the bits


class ConvolutionPart(NamedTuple):
    """What a shard convolves. Without outputs it has no terms."""

    shape: tuple[int, ...]  # of its outputs, without the batch
    whole: Term | None  # all outputs, from all bits
    ready: Term | None  # all outputs, as if others' bits were zero; if the border comes after it
    border: tuple[Term, ...]  # strips, from all bits


def convolution_part(
    kernel: Kernel,
    outputs: Box,
    here: Sequence[InputPart],
    others: Sequence[InputPart],
    strips: Sequence[Box],
) -> ConvolutionPart:
    """Of a shard that has some bits and gets others, which the outputs in `strips` wait for."""
    shape = tuple(interval.length for interval in outputs)
    if is_empty(outputs):
        return ConvolutionPart(shape, None, None, ())
    everything = [*here, *others]
    return ConvolutionPart(
        shape,
        _term(kernel, outputs, outputs, everything),
        _term(kernel, outputs, outputs, here) if strips else None,
        tuple(_term(kernel, outputs, strip, everything) for strip in strips),
    )


def _term(kernel: Kernel, outputs: Box, part: Box, bits: Sequence[InputPart]) -> Term:
    slab = slab_of(kernel.needs(part), bits)
    moves, filled = [], 0
    for bit in bits:
        box = common(slab.box, bit.box)
        if not is_empty(box):
            there, here = slices(relative(box, bit.origin)), slices(relative(box, slab.box))
            moves.append(SlabMove(bit.tensor, there, here, box == bit.origin, box == slab.box))
            # Parts do not overlap, so where their volumes fall short of the slab there are gaps,
            # which must be zero.
            filled += volume(box)
    return Term(
        slices(relative(part, outputs)),
        part[0],
        tuple(interval.length for interval in slab.box),
        slab.padding,
        tuple(moves),
        filled < volume(slab.box),
    )


def border(
    windows: Sequence[Window], outputs: Box, needed: Box, owned: Box, sizes: Sequence[int]
) -> tuple[Box, ...]:
    """The strips that must wait for others; none if there is too little to do meanwhile.

    `needed` is what the outputs look at, `owned` what the shard has of an input of `sizes`.
    """
    inside = interior(windows, outputs, needed, owned, sizes)
    if is_empty(inside) or volume(inside) < _LEAST_INTERIOR * volume(outputs):
        return ()
    return tuple(around(outputs, inside))


def interior(
    windows: Sequence[Window], outputs: Box, needed: Box, owned: Box, sizes: Sequence[int]
) -> Box:
    """The outputs that look at nothing but what the shard has; may be empty."""
    if is_empty(owned) or not owned[0].covers(needed[0]):  # every output looks at all channels
        return (Interval(0, 0),) * len(outputs)
    inside = [outputs[0]]
    for axis, window in enumerate(windows, start=1):
        known, need = owned[axis], needed[axis]
        # At an edge of the image the shard also knows what lies beyond: the padding, which is zero.
        # So outputs at the edge belong to the interior there.
        start = min(known.start, need.start) if known.start == 0 else known.start
        stop = max(known.stop, need.stop) if known.stop == sizes[axis] else known.stop
        inside.append(window.within(Interval(start, stop)).meets(outputs[axis]))
    return tuple(inside)


def around(outer: Box, inner: Box) -> list[Box]:
    """What a box has and another, inside of it, has not: strips that do not overlap."""
    strips = []
    rest = outer
    for axis, (whole, kept) in enumerate(zip(outer, inner, strict=True)):
        for side in (Interval(whole.start, kept.start), Interval(kept.stop, whole.stop)):
            if side.length:
                strips.append((*rest[:axis], side, *rest[axis + 1 :]))
        # The next axis cuts its strips from what is left. Invariant: strips do not overlap, so no
        # output is computed twice, and together with the interior they are all outputs.
        rest = (*rest[:axis], kept, *rest[axis + 1 :])
    return strips


def slab_of(needed: Box, bits: Sequence[InputPart]) -> Slab:
    """What must be put together of what is needed, where all but the bits is zero.

    Zeros on both sides of an axis alike need not be: they are left to torch. So a tile is often
    convolved as it lies in memory.
    """
    found = [common(needed, bit.box) for bit in bits]
    found = [box for box in found if not is_empty(box)]
    if not found:
        return Slab(needed, (0,) * (len(needed) - 1))
    box, padding = [needed[0]], []
    for axis, need in enumerate(needed[1:], start=1):
        before = min(each[axis].start for each in found) - need.start
        after = need.stop - max(each[axis].stop for each in found)
        # Torch pads both sides of an axis alike, so it can only add the smaller of the two.
        zeros = min(before, after)
        box.append(Interval(need.start + zeros, need.stop - zeros))
        padding.append(zeros)
    return Slab(tuple(box), tuple(padding))


def common(one: Box, other: Box) -> Box:
    return tuple(mine.meets(theirs) for mine, theirs in zip(one, other, strict=True))


def volume(box: Box) -> int:
    return math.prod(interval.length for interval in box)

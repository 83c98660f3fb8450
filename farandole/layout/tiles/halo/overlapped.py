"""A convolution that computes while its halo is on the way, and keeps no second copy of its input.

    forward    1  post what others need of this tile
               2  convolve the tile as it is, as if the halo were zero
               3  take the halo
               4  convolve the border once more, from thin slabs with the halo

    backward   1  the gradient of the tile with its halo; post what is the halo's
               2  the gradients of the weight and the bias
               3  take the gradients of what was sent, and add them

Saved in between are the tile, which often is there anyway as the result of the layer before, and
the halo. Both are put together when the weight's gradient needs it, and not kept; and in the
forward pass too, where nothing is on the way or the border is too large a part of the tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from farandole.layout.tiles.core.flow import Flow
from farandole.layout.tiles.core.grid import Box, Copy, relative
from farandole.layout.tiles.core.shard_group import ShardGroup
from farandole.layout.tiles.core.tile import Tile
from farandole.layout.tiles.halo.borders import (
    ConvolutionPart,
    InputPart,
    Term,
    border,
    convolution_part,
)
from farandole.layout.tiles.halo.exchange import expect_parts, post_parts, slices, taken_parts
from farandole.layout.tiles.halo.windows import OutputParts, as_needs
from farandole.layout.tiles.ops.kernels import Kernel


class OverlapPlan(NamedTuple):
    """A layer's convolution, for the shards here."""

    kernel: Kernel
    parts: Sequence[ConvolutionPart]
    travels: bool  # whether any shard gets something from another
    copies: Sequence[Copy]  # between different shards; those here are one end of it
    incoming: Sequence[Copy]  # those of them that come from elsewhere
    owned: Sequence[Box]  # for each shard here, from the corner of its piece

    @property
    def is_plain(self) -> bool:
        """Whether torch can do all of it: nothing travels, and nothing must be put together.

        Not where a shard has no outputs. Even those must have a gradient if the weight has one, or
        shards would not agree on what travels further on.
        """
        return not self.travels and all(
            part.whole and _lies_ready(part.whole) for part in self.parts
        )


class ConvolutionTask(NamedTuple):
    """A plan that is carried out."""

    plan: OverlapPlan
    shards: ShardGroup
    number: int  # of its exchange
    overlap: bool  # whether it computes while something is on its way

    def sent(self, copy: Copy, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """What a copy takes of its source's piece, or of the gradient of that."""
        at = self.shards.mine.index(copy.source)
        return pieces[at][slices(self.plan.owned[at])][slices(copy.taken)]

    def add_to(self, gradients: Sequence[torch.Tensor]) -> None:
        """Takes what others have found of the gradients of the pieces here."""
        for copy, part in taken_parts(self.shards, self.number, self.plan.copies, back=True):
            self.sent(copy, gradients).add_(part)


def convolve(
    flow: Flow,
    x: Tile,
    kernel: Kernel,
    outputs: OutputParts,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> list[torch.Tensor]:
    """The outputs of each shard here; differentiable. *Together*, by all shards."""
    # A plan follows from this key alone. It is made once for a layer and a shape, not in every
    # call.
    key = kernel, x.sizes, x.axes, x.margin, outputs.margin, flow.overlap
    plan: OverlapPlan = flow.plans.get(key) or flow.plans.setdefault(
        key, _plan(flow, x, kernel, outputs)
    )
    # As torch's own convolution does; and what is cast before it travels is smaller.
    weight, *pieces = (_autocast(each) for each in (weight, *x.pieces))
    bias = None if bias is None else _autocast(bias)
    if plan.is_plain:
        terms = (part.whole for part in plan.parts)
        return [_outputs(kernel, term, pieces, weight, bias) for term in terms if term]
    job = ConvolutionTask(
        plan, flow.shards, flow.shards.next() if plan.travels else -1, flow.overlap
    )
    result = _Convolve.apply(job, weight, bias, *pieces)
    return [result] if isinstance(result, torch.Tensor) else list(result)


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        job: ConvolutionTask,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *pieces: torch.Tensor,
    ) -> Any:
        plan, shards, number, _ = job
        kernel = plan.kernel
        post_parts(shards, number, plan.copies, lambda copy: job.sent(copy, pieces))
        # Everything is posted before anything is waited for. Invariant: all shards do their
        # exchanges in the same order, so no two of them wait for each other in a circle.
        if any(part.ready for part in plan.parts):
            expect_parts(shards, plan.copies)
        begun = [
            part.ready and _outputs(kernel, part.ready, pieces, weight, bias) for part in plan.parts
        ]
        came = dict(taken_parts(shards, number, plan.copies))
        tensors = [*pieces, *(came[copy] for copy in plan.incoming)]
        results = []
        for part, result in zip(plan.parts, begun, strict=True):
            if part.whole is None:
                result = pieces[0].new_empty((pieces[0].shape[0], *part.shape))
            elif result is None:
                result = _outputs(kernel, part.whole, tensors, weight, bias)
            # Outputs near the edge were computed as if the halo were zero. They are overwritten,
            # not added to: each output is the sum over its whole window, in torch's own order.
            for term in part.border:
                result[term.outputs] = _outputs(kernel, term, tensors, weight, bias)
            results.append(result)
        ctx.job, ctx.shapes = job, [tensor.shape for tensor in tensors]
        # Only the gradient of the weight asks for the input.
        ctx.save_for_backward(weight, *(tensors if ctx.needs_input_grad[1] else ()))
        return tuple(results) if len(results) > 1 else results[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        job: ConvolutionTask = ctx.job
        plan, shards, number, overlap = job
        weight, *tensors = ctx.saved_tensors
        _, for_weight, for_bias, *for_pieces = ctx.needs_input_grad
        of_weight = of_bias = None
        of_pieces: list[Any] = [None] * len(for_pieces)
        terms = [
            (part.whole, gradient)
            for part, gradient in zip(plan.parts, gradients, strict=True)
            if part.whole
        ]
        # All shards agree on what has a gradient, and so on what travels.
        if any(for_pieces):
            sums = _input_gradients(plan.kernel, terms, weight, ctx.shapes)
            of_pieces, of_halos = sums[: len(for_pieces)], sums[len(for_pieces) :]
            halos = dict(zip(plan.incoming, of_halos, strict=True))
            post_parts(shards, number, plan.copies, halos.__getitem__, back=True)
            if overlap:
                expect_parts(shards, plan.copies, back=True)
            else:
                job.add_to(of_pieces)
        if for_weight:
            of_weight = _weight_gradient(plan.kernel, terms, weight, tensors)
        if for_bias:
            of_bias = _bias_gradient(terms, weight)
        if any(for_pieces) and overlap:
            job.add_to(of_pieces)
        return None, of_weight, of_bias, *of_pieces


_Terms = Sequence[tuple[Term, torch.Tensor]]
"""Those of all outputs of the shards here, with the gradients of these outputs."""


def _input_gradients(
    kernel: Kernel, terms: _Terms, weight: torch.Tensor, shapes: Sequence[torch.Size]
) -> list[torch.Tensor]:
    """Of the pieces and what came, as far as outputs here look at them."""
    sums: dict[int, torch.Tensor] = {}
    for term, gradient in terms:
        shape = (gradient.shape[0], *term.shape)
        found = kernel.input_gradient(gradient, shape, weight, term.channels, term.padding)
        for move in term.moves:
            part = found[move.here]
            if move.all_there and move.tensor not in sums:
                # A part is a view of the slab, which would stay in memory with it. Only a part that
                # is the whole slab is kept as it is.
                sums[move.tensor] = part if move.all_here else part.clone()
                continue
            if move.tensor not in sums:
                sums[move.tensor] = weight.new_zeros(shapes[move.tensor])
            sums[move.tensor][move.there] += part
    return [sums[at] if at in sums else weight.new_zeros(shape) for at, shape in enumerate(shapes)]


def _weight_gradient(
    kernel: Kernel, terms: _Terms, weight: torch.Tensor, tensors: Sequence[torch.Tensor]
) -> torch.Tensor:
    result = torch.zeros_like(weight)
    for term, gradient in terms:
        # Put together once more instead of kept since the forward: a slab is a second copy of the
        # input.
        slab, rows = _put_together(term, tensors), term.channels.slice
        found = kernel.weight_gradient(gradient, slab, weight, term.channels, term.padding)
        result[rows] += found
    return result


def _bias_gradient(terms: _Terms, weight: torch.Tensor) -> torch.Tensor:
    result = weight.new_zeros(weight.shape[0])
    for term, gradient in terms:
        result[term.channels.slice] += gradient.sum((0, *range(2, gradient.dim())))
    return result


def _outputs(
    kernel: Kernel,
    term: Term,
    tensors: Sequence[torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    slab = _put_together(term, tensors)
    return kernel.outputs(slab, weight, bias, term.channels, term.padding)


def _put_together(term: Term, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A term's slab. No copy if one tensor has all of it."""
    if _lies_ready(term):
        (move,) = term.moves
        return tensors[move.tensor][move.there]
    shape = (tensors[0].shape[0], *term.shape)
    make = tensors[0].new_zeros if term.has_gaps else tensors[0].new_empty
    result: torch.Tensor = make(shape)
    for move in term.moves:
        result[move.here] = tensors[move.tensor][move.there]
    return result


def _lies_ready(term: Term) -> bool:
    return any(move.all_here for move in term.moves)


def _plan(flow: Flow, x: Tile, kernel: Kernel, outputs: OutputParts) -> OverlapPlan:
    mine = flow.shards.mine
    held = [x.held(shard) for shard in mine]
    needs = tuple(as_needs(box) for box in outputs.needed)
    if x.has_all(needs):
        parts = [
            convolution_part(kernel, outputs.wanted[shard], [InputPart(at, box, box)], [], [])
            for at, (shard, box) in enumerate(zip(mine, held, strict=True))
        ]
        return OverlapPlan(kernel, parts, False, (), (), ())
    copies = [
        copy
        for copy in flow.copies(x.sizes, x.axes, needs)
        # A shard convolves its own piece where it lies, so it copies nothing to itself.
        if copy.source != copy.to and (copy.source in mine or copy.to in mine)
    ]
    incoming = [copy for copy in copies if copy.source not in mine]
    parts = []
    for at, shard in enumerate(mine):
        wanted, needed, owned = outputs.wanted[shard], outputs.needed[shard], x.owned(shard)
        others = []
        for copy in (copy for copy in copies if copy.to == shard):
            box = tuple(run.moved(need.start) for run, need in zip(copy.put, needed, strict=True))
            if copy.source in mine:
                place = mine.index(copy.source)
                others.append(InputPart(place, box, held[place]))
            else:
                others.append(InputPart(len(mine) + incoming.index(copy), box, box))
        strips: Sequence[Box] = ()
        if flow.overlap and any(copy.to == shard for copy in incoming):
            strips = border(kernel.windows, wanted, needed, owned, x.sizes)
        parts.append(
            convolution_part(kernel, wanted, [InputPart(at, owned, held[at])], others, strips)
        )
    inside = [relative(x.owned(shard), box) for shard, box in zip(mine, held, strict=True)]
    return OverlapPlan(kernel, parts, True, copies, incoming, inside)


def _autocast(tensor: torch.Tensor) -> torch.Tensor:
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))

"""Compares a layout with the plain model, on a small part of the first batch.

    first rank of a replica         all its ranks
    ───────────────────────         ─────────────
    1. the plain model: loss,
       gradients, buffers
    2. its weights ───────────────▶ take them, in double precision
    3.                              run the schedule, without an update
    4. what it computed ──────────▶ compare what each of them holds
    5.                              everything as it was before

Two passes over the batch are compared, so that code which does something else the second time is
found too. Where double precision is not possible, the plain model tells how far rounding reaches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from farandole.errors import FarandoleError, InexactError
from farandole.layout.objective import Objective
from farandole.layout.pipeline.micro import Micro, batch_rows, first_rows
from farandole.layout.pipeline.pipelined import Pipelined
from farandole.layout.self_check.compare import (
    Difference,
    RankPart,
    by_whole_name,
    compare_buffers,
    compare_gradients,
    from_first,
    share_tolerance,
)
from farandole.layout.self_check.draws import ExpectedDraws
from farandole.layout.self_check.layers import (
    LayerSums,
    OwnPieces,
    RankSums,
    everything,
    first_difference,
    watched,
)
from farandole.layout.self_check.passed import PassedCheck
from farandole.layout.self_check.plain import CannotCheckError, Computed, PlainModel
from farandole.layout.self_check.swapped import swapped
from farandole.layout.tile_groups import TileGroups
from farandole.layout.tiles.core.tile import Tile

_PASSES = 2
_ROWS_PER_MICRO = 2  # BatchNorm refuses one value per channel
_LEAST_ROWS = 4


class SelfCheck:
    """Made before the model is taken apart, and run once, by all ranks of a replica together.

    `keeps`: whether this is the rank with the plain model. `double`: whether the model may be
    computed in double precision. What was recorded with a sample may not: the recording is of the
    sample's precision.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        device: torch.device,
        *,
        keeps: bool,
        double: bool,
    ) -> None:
        self._plain: PlainModel | None = None
        self._reason = ""
        self._dtypes = (torch.float64, None) if double else (None,)
        if keeps:
            try:
                self._plain = PlainModel(model, objective, device)
            except CannotCheckError as error:
                self._reason = str(error)

    def run(self, held: RankPart, inputs: Any, targets: Any) -> str:
        """*Together.* Says what came of it: that the layout computes what the plain model does, or
        why that could not be found out. Raises `InexactError` where it does not."""
        pipelined, pipe = held.pipelined, held.pipelined.pipe
        passed = None if self._plain is None else self._passed(pipelined, inputs, targets)
        known = pipe.broadcast_json(passed is not None and passed.when())
        if known:
            return f"the layout was checked against the plain model before, on {known}"
        dtype, computed, reason = None, None, self._reason
        if self._plain is not None:
            try:
                dtype, computed = self._computed(pipelined, inputs, targets)
            except CannotCheckError as error:
                reason = str(error)
        # Only the first rank has tried the plain model. All ranks follow what it found, so that
        # they run the trial together, in one precision, or skip it together.
        reason, precision, expected_loss = pipe.broadcast_json(
            [reason, str(dtype), 0.0 if computed is None else computed.loss]
        )
        if reason:
            return f"the layout was not checked against the plain model: {reason}"
        dtype = torch.float64 if precision == str(torch.float64) else None
        micros = small_batch(pipelined, inputs, targets, dtype)
        differences = self._differences(held, micros, dtype, computed, expected_loss)
        if differences:
            layer = self._first_layer(held, micros, dtype)
            raise InexactError(_refusal(pipelined, differences, layer))
        if passed is not None:
            passed.note()
        return "checked: the layout computes what the plain model does"

    def _passed(self, pipelined: Pipelined, inputs: Any, targets: Any) -> PassedCheck:
        assert self._plain is not None
        return PassedCheck(
            self._plain.model, str(pipelined.layout), pipelined.device, (inputs, targets)
        )

    def _computed(
        self, pipelined: Pipelined, inputs: Any, targets: Any
    ) -> tuple[torch.dtype | None, Computed]:
        """In the best precision that the plain model can be computed in."""
        assert self._plain is not None
        if any(isinstance(leaf, Tile) for leaf in pytree.tree_leaves((inputs, targets))):
            raise CannotCheckError("every worker reads its own tile, and nobody has a whole image")
        reason = ""
        for dtype in self._dtypes:
            try:
                micros = small_batch(pipelined, inputs, targets, dtype)
                if pipelined.layout.streams and len(micros) < pipelined.layout.microbatches:
                    raise CannotCheckError(f"the first batch makes {len(micros)} micro-batches")
                computed = self._plain.compute(micros, _PASSES, dtype)
            except (CannotCheckError, FarandoleError) as error:
                reason = str(error)
                continue
            if not math.isfinite(computed.loss):
                raise CannotCheckError(f"the loss of the first batch is {computed.loss}")
            return dtype, computed
        raise CannotCheckError(reason)

    def _differences(
        self,
        held: RankPart,
        micros: Sequence[Micro],
        dtype: torch.dtype | None,
        computed: Computed | None,
        expected_loss: float,
    ) -> list[Difference]:
        """*Together.* Of all ranks."""
        pipelined, pipe = held.pipelined, held.pipelined.pipe
        tolerance = share_tolerance(pipe, computed)
        with swapped(held.bridge, dtype), ExpectedDraws():
            self._spread_weights(held)
            loss = sum(float(pipelined.trial(micros)) for _ in range(_PASSES))
            pipelined.add_up_gradients()
            found = compare_gradients(held, computed, tolerance)
            found += compare_buffers(held, computed, tolerance)
        off = abs(loss - expected_loss)
        if pipe.rank == 0 and not off <= tolerance.of_loss(expected_loss):
            found.append(Difference("loss", "loss", off / max(abs(expected_loss), 1e-300)))
        # Invariant: all ranks raise, or none does. So the decision is made from everybody's
        # findings, and not from a rank's own.
        gathered = pipe.gather_json([list(each) for each in found])
        # Several ranks may hold a weight, and find the same.
        distinct = {(kind, name): off for of_rank in gathered for kind, name, off in of_rank}
        return [Difference(kind, name, off) for (kind, name), off in distinct.items()]

    def _spread_weights(self, held: RankPart) -> None:
        """The plain model's, which may be older than those that training begins with."""
        tensors = None
        if self._plain is not None:
            model = self._plain.model
            tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        mine = by_whole_name(held)
        for name, tensor in from_first(held.pipelined.pipe, held.pipelined.device, tensors):
            if name in mine:
                mine[name].data.copy_(tensor)

    def _first_layer(
        self, held: RankPart, micros: Sequence[Micro], dtype: torch.dtype | None
    ) -> str | None:
        """*Together.* Runs both once more, and watches every layer."""
        pipelined, pipe = held.pipelined, held.pipelined.pipe
        plain: LayerSums = {}
        if self._plain is not None:
            layers: dict[str, tuple[nn.Module, OwnPieces]] = {
                name: (module, everything)
                for name, module in self._plain.model.named_modules()
                if name
            }
            with watched(layers) as plain:
                self._plain.run_once(micros, dtype)
        with swapped(held.bridge, dtype), ExpectedDraws(), watched(_own_layers(held)) as mine:
            self._spread_weights(held)
            pipelined.trial(micros)
        close = 1e-7 if dtype is torch.float64 else 1e-3
        gathered = pipe.gather_json(
            [plain, TileGroups(pipelined.layout.group_sizes).shard(pipe.rank), mine]
        )
        return first_difference(
            gathered[0][0], [RankSums(shard, seen) for _, shard, seen in gathered], close
        )


def small_batch(
    pipelined: Pipelined, inputs: Any, targets: Any, dtype: torch.dtype | None
) -> list[Micro]:
    """A few rows of a batch, in micro-batches like those of a whole one."""
    rows = batch_rows(inputs, targets)
    wanted = min(rows, max(_LEAST_ROWS, _ROWS_PER_MICRO * pipelined.layout.microbatches))

    def converted(leaf: torch.Tensor) -> torch.Tensor:
        leaf = leaf.to(pipelined.device)
        return leaf.to(dtype) if dtype is not None and leaf.is_floating_point() else leaf

    inputs, targets = (
        pytree.tree_map_only(torch.Tensor, converted, first_rows(tree, wanted, rows))
        for tree in (inputs, targets)
    )
    return pipelined.micros(inputs, targets)


def _own_layers(held: RankPart) -> dict[str, tuple[nn.Module, OwnPieces]]:
    tiling = next(iter(held.tilings.values()), None)

    def own(output: torch.Tensor) -> Sequence[torch.Tensor]:
        assert tiling is not None
        return [piece for _, piece in tiling.counted(output)]

    return {
        name: (module, everything if tiling is None else own)
        for name, module in held.layers.items()
    }


def _refusal(pipelined: Pipelined, differences: Sequence[Difference], layer: str | None) -> str:
    said = []
    for kind in ("loss", "gradient", "buffer"):
        found = [each for each in differences if each.kind == kind]
        if not found:
            continue
        worst = max(found, key=lambda each: -1.0 if math.isnan(each.off) else each.off)
        extent = "" if math.isnan(worst.off) else f" (by {_percent(worst.off)})"
        if kind == "loss":
            said.append(f"the loss differs{extent}")
        elif len(found) == 1:
            said.append(f"the {kind} {'of ' * (kind == 'gradient')}{worst.name!r} differs{extent}")
        else:
            said.append(f"{len(found)} {kind}s differ, most of all {worst.name!r}{extent}")
    where = (
        f"The first layer whose output differs is {layer!r}; look at what comes between it and the "
        "layer before."
        if layer is not None
        else "The layers' outputs agree in the first pass, so it is the backward pass, a buffer, "
        "or code that does something else the second time."
    )
    return (
        f"layout {pipelined.layout} does not compute what the plain model computes. On the first "
        f"batch, {'; '.join(said)}. {where} Change that part of the model, or train it under "
        "another layout or none. With run.trainer(…, check=False) it trains as it is, on what is "
        "then not the model's gradient."
    )


def _percent(share: float) -> str:
    if not math.isfinite(share):
        return "all of it"
    return f"{share:.1%}" if share >= 0.001 else f"{share:.1e}"

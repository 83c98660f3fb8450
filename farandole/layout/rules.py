"""Which options of a layout go together: the rules as a table, checked in one loop.

A rule says when a layout breaks it, and why that is refused. Rules are in the order in which they
are checked: of several that are broken, the first is reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from farandole.errors import UserError
from farandole.layout.option_groups import LayoutOptions, TileOptions

_MIRRORED = ("layer", "gpipe", "1f1b")
"""Schedules that can be run in two directions."""


class Rule(NamedTuple):
    """`is_broken` by a layout, and the `reason` to give then, with the layout's values."""

    is_broken: Callable[[LayoutOptions], Any]
    reason: Callable[[LayoutOptions], str]


def _fewer_than(count: int, stages: int | Literal["auto"]) -> bool:
    return stages != "auto" and count < stages


SCHEDULE_RULES: Sequence[Rule] = (
    Rule(
        lambda o: o.schedule == "layer" and o.microbatches > 1 and not o.bidirectional,
        lambda o: f"schedule=layer has one micro-batch, not {o.microbatches}; take gpipe or 1f1b",
    ),
    Rule(
        lambda o: o.bidirectional and o.schedule not in (*_MIRRORED, "gems"),
        lambda o: f"bidirectional goes with {', '.join(_MIRRORED)}, not with {o.schedule}",
    ),
    Rule(
        lambda o: o.mirrored and o.microbatches % (2 * o.turns) > 0,
        lambda o: (
            f"two directions in {o.turns} turn(s) need micro-batches in multiples of "
            f"{2 * o.turns}, not {o.microbatches}"
        ),
    ),
    Rule(
        lambda o: o.pairs > 1 and not o.bidirectional,
        lambda o: f"pairs={o.pairs} is for bidirectional layouts",
    ),
    Rule(
        lambda o: o.schedule == "interleaved" and o.stages != "auto" and o.stages % o.chunks > 0,
        lambda o: f"chunks={o.chunks} stages on each rank do not divide stages={o.stages}",
    ),
    Rule(
        lambda o: (
            o.replicas and (o.mirrored or o.schedule in ("interleaved", "zero-bubble", "2bw"))
        ),
        lambda o: (
            f"replicas of single stages go with gpipe, 1f1b and pipedream, not with "
            f"{o.schedule}{', bidirectional' if o.bidirectional else ''}"
        ),
    ),
    Rule(
        lambda o: o.schedule == "pipedream" and o.microbatches > 1,
        lambda o: "pipedream updates after every batch, whole: leave microbatches out, or take 2bw",
    ),
    Rule(
        lambda o: o.schedule == "2bw" and _fewer_than(o.microbatches, o.stages),
        lambda o: (
            f"2bw keeps two versions of the weights, which is enough from "
            f"microbatches={o.stages} (the stages) on, not with {o.microbatches}"
        ),
    ),
    Rule(
        lambda o: o.vertical and (o.schedule != "pipedream" or max(o.replicas, default=1) > 1),
        lambda o: "vertical is for pipedream with one rank for each stage",
    ),
    Rule(
        lambda o: not o.stash and (o.schedule != "pipedream" or o.vertical),
        lambda o: "stash=false is for pipedream, and not with vertical",
    ),
    Rule(
        lambda o: o.recompute and o.schedule == "zero-bubble",
        lambda o: (
            "zero-bubble splits the backward in two; recompute would do its work twice. Take 1f1b"
        ),
    ),
    Rule(
        lambda o: o.stages == "auto" and o.schedule not in ("gpipe", "1f1b", "pipedream"),
        lambda o: f"stages=auto goes with gpipe, 1f1b and pipedream, not with {o.schedule}",
    ),
    Rule(
        lambda o: o.recompute_blocks > 0 and not o.recompute,
        lambda o: f"recompute_blocks={o.recompute_blocks} is for recompute",
    ),
)


def _tile_option(o: TileOptions) -> str:
    """The first option that was given and has a meaning with tiles alone; empty: none was."""
    given = {
        f"tiled={o.tiled}": o.tiled > 0,
        f"handoff={o.handoff}": bool(o.handoff),
        f"halo={o.halo}": o.halo != "auto",
        "overlap=false": not o.overlap,
        "in_turn": o.in_turn,
    }
    return next((word for word, is_given in given.items() if is_given), "")


TILE_RULES: Sequence[Rule] = (
    Rule(
        lambda o: o.shards == 1 and _tile_option(o),
        lambda o: f"{_tile_option(o)} is for layouts with tiles",
    ),
    Rule(
        lambda o: o.shards > 1 and (o.stages == "auto" or o.streams or o.schedule == "zero-bubble"),
        lambda o: (
            f"tiles and channels go with layer, gpipe, 1f1b, interleaved and gems in a fixed "
            f"number of stages, not with {o.schedule}, stages={o.stages}"
        ),
    ),
    Rule(
        lambda o: o.shards > 1 and o.replicas,
        lambda o: "replicas of single stages do not go with tiles",
    ),
    Rule(
        lambda o: o.tiled > 0 and o.stages != "auto" and o.tiled > o.stages,
        lambda o: f"tiled={o.tiled} of stages={o.stages}",
    ),
    Rule(
        lambda o: o.tiled > 0 and (o.mirrored or o.schedule == "interleaved"),
        lambda o: (
            "with two stages on a rank, every stage has a rank for each tile: leave tiled out"
        ),
    ),
    Rule(
        lambda o: o.tiled > 0 and o.in_turn,
        lambda o: "in_turn leaves one rank to every stage anyway: leave tiled out",
    ),
)


def check_combination(layout: LayoutOptions) -> None:
    """Raises `UserError` for the first rule that is broken."""
    for rule in (*SCHEDULE_RULES, *TILE_RULES):
        if rule.is_broken(layout):
            raise UserError(f"layout: {rule.reason(layout)}.")


def check_numbers(layout: LayoutOptions) -> None:
    """Raises `UserError` for a number that is out of its range, whatever the others are."""
    for name in ("microbatches", "chunks", "pairs", "channels", "halo", "stages"):
        value = getattr(layout, name)
        if value != "auto" and value < 1:
            raise UserError(f"layout: {name}={value} must be at least 1.")
    for name in ("balance", "replicas"):
        values = getattr(layout, name)
        if values and (min(values) < 1 or len(values) != layout.stages):
            raise UserError(
                f"layout: {name}={values} must be one number, at least 1, for each of "
                f"stages={layout.stages}."
            )
    if len(layout.tiles) > 3 or min(layout.tiles, default=1) < 1:
        raise UserError(
            f"layout: tiles={layout.tiles} must be one number, at least 1, for each axis of the "
            "image: up to three."
        )
    if layout.recompute_blocks < 0 or layout.tiled < 0:
        raise UserError(
            f"layout: recompute_blocks={layout.recompute_blocks} and tiled={layout.tiled} must be "
            "at least 0."
        )
    if layout.memory_gib is not None and not 0 < layout.memory_gib < math.inf:
        raise UserError(f"layout: memory_gib={layout.memory_gib:g} must be above 0.")

"""The schemes by name. One that is registered here is checked, drawn, run and planned with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from farandole.errors import UserError, nearest
from farandole.registry import Registry
from farandole.schedule.pipelines.actions import Pipeline, require_sizes
from farandole.schedule.pipelines.flushed import flushed
from farandole.schedule.pipelines.gems import gems
from farandole.schedule.pipelines.interleaved import interleaved
from farandole.schedule.pipelines.pipedream import PipeDream
from farandole.schedule.pipelines.placement import in_a_row
from farandole.schedule.pipelines.streams import Stream
from farandole.schedule.pipelines.two_versions import TwoVersions
from farandole.schedule.pipelines.zero_bubble import zero_bubble


@dataclass(frozen=True)
class Scheme:
    """A pipeline scheme whose steps end with an update on every rank."""

    make: Callable[..., Pipeline]
    """Of the numbers of stages and micro-batches, and then, if it has them, of the chunks on each
    rank or of the replicas of each stage."""
    has_chunks: bool = False  # several stages share a rank
    has_replicas: bool = False  # several ranks may share a stage and take turns
    has_directions: bool = False  # two copies of the model may run in opposite directions (GEMS)


SCHEMES: Registry[Scheme] = Registry("pipeline schedule")
"""What `build` knows, in the order in which the docs list them. A new scheme is registered here."""
SCHEMES.register("layer", Scheme(functools.partial(flushed, "layer"), has_directions=True))
for _name in ("gpipe", "1f1b"):
    SCHEMES.register(
        _name,
        Scheme(functools.partial(flushed, _name), has_replicas=True, has_directions=True),
    )
SCHEMES.register("interleaved", Scheme(interleaved, has_chunks=True))
SCHEMES.register("zero-bubble", Scheme(zero_bubble))

STREAMS = ("pipedream", "2bw")
"""What `stream` knows: a step begins before the one before it has ended."""


def schedule_names() -> tuple[str, ...]:
    """All that a layout may name: `gems` is `layer` in two directions."""
    return (*SCHEMES, "gems", *STREAMS)


def build(
    name: str,
    stages: int,
    micros: int,
    *,
    chunks: int = 2,
    replicas: Sequence[int] = (),
    pairs: int = 0,
) -> Pipeline:
    """One step of the scheme `name`, which ends with the update to version 1 on every rank.

    `chunks` is how many stages of `interleaved` share a rank. `replicas` gives some stages several
    ranks, which take turns (gpipe, 1f1b). `pairs` above 0 makes it GEMS: two copies of the model in
    opposite directions, which take turns so often (layer, gpipe, 1f1b).
    """
    if name not in SCHEMES:
        other = " It has no flush: see stream()." if name in STREAMS else ""
        raise UserError(f"no pipeline schedule {name!r}.{other or ' ' + nearest(name, SCHEMES)}")
    require_sizes(name, stages, micros)
    if pairs < 0:
        raise UserError(f"{name}: {pairs} pairs; give 0 for one direction, or 1 or more for two.")
    scheme = SCHEMES[name]
    if pairs and not scheme.has_directions:
        both = ", ".join(known for known in SCHEMES if SCHEMES[known].has_directions)
        raise UserError(f"{name} has one direction; pairs go with {both}.")
    if replicas and (pairs or not scheme.has_replicas):
        several = ", ".join(known for known in SCHEMES if SCHEMES[known].has_replicas)
        raise UserError(
            f"{name}{' in two directions' if pairs else ''} has one rank for each stage; replicas "
            f"go with {several} in one direction."
        )
    if pairs:
        return gems(name, stages, micros, pairs)
    if scheme.has_chunks:
        return scheme.make(stages, micros, chunks)
    if replicas:
        return scheme.make(stages, micros, replicas)
    return scheme.make(stages, micros)


def stream(
    name: str,
    stages: int,
    micros: int,
    *,
    replicas: Sequence[int] = (),
    vertical: bool = False,
    stash: bool = True,
) -> Stream:
    """The endless run of the scheme `name`, with `micros` micro-batches in each step call.

    `replicas`, `vertical` and `stash` are for pipedream: several ranks for some stages; all stages
    use the version of the first one; a backward uses the weights of its forward.
    """
    if name not in STREAMS:
        other = " Each step ends with a flush: see build()." if name in SCHEMES else ""
        raise UserError(f"no endless schedule {name!r}.{other or ' ' + nearest(name, STREAMS)}")
    require_sizes(name, stages, micros)
    homes = (in_a_row(stages, replicas),)
    if name == "2bw":
        if replicas or vertical or not stash:
            raise UserError("2bw has no replicas, vertical or stash: they are for pipedream.")
        # With fewer, the first stage would begin a batch before it has made the version that this
        # batch uses.
        if micros < stages:
            raise UserError(
                f"2bw: {micros} micro-batches for {stages} stages need more than two versions of "
                f"the weights; give at least {stages}."
            )
        return TwoVersions(name, stages, homes, micros)
    if micros != 1:
        raise UserError(f"pipedream: {micros} micro-batches; a step is one whole minibatch.")
    if vertical and max(replicas, default=1) > 1:
        raise UserError("pipedream: vertical is for one rank for each stage, without replicas.")
    if vertical and not stash:
        raise UserError("pipedream: vertical keeps versions, so it cannot go without stash.")
    return PipeDream(name, stages, homes, micros, vertical, stash)

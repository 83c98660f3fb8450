"""Pipelines of the simple schemes: one step, and an update that ends it on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from farandole.schedule.pipelines import orders
from farandole.schedule.pipelines.actions import Action, Pipeline, update
from farandole.schedule.pipelines.placement import depth, in_a_row

Order = Callable[[Sequence[int], int], Iterator[orders.Turn]]

ORDERS: Mapping[str, Order] = MappingProxyType(
    {
        "layer": orders.layer,
        "gpipe": orders.gpipe,
        "1f1b": orders.one_forward_one_backward,
    }
)


def flushed(name: str, stages: int, micros: int, replicas: Sequence[int] = ()) -> Pipeline:
    """The scheme `name` of `ORDERS`, with `replicas` ranks for each stage."""
    homes = in_a_row(stages, replicas)
    actions: list[tuple[Action, ...]] = []
    for stage, ranks in enumerate(homes):
        for index in range(len(ranks)):
            turns = ORDERS[name](range(index, micros, len(ranks)), depth(homes, stage))
            computed = (Action(kind, stage, micro) for kind, micro in turns)
            actions.append((*computed, update(1)))
    return Pipeline(name, micros, (homes,), tuple(actions))

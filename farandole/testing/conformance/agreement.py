"""Ranks that call different things: all are told, and the group can still be used."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from farandole.comm import Group
from farandole.errors import CommError
from farandole.testing.conformance.material import made, reduced, require_equal, require_error


def check_different_shapes(group: Group) -> None:
    for way in ("auto", "native", "ring"):
        reduce = functools.partial(group.all_reduce, algorithm=way)
        _differ(group, lambda n: reduce(torch.ones(n)), {3: "(3,)", 4: "(4,)"})  # noqa: B023
    _differ(group, lambda n: group.reduce_scatter(torch.ones(n, 2)), {6: "(6, 2)", 7: "(7, 2)"})
    _differ(group, lambda n: group.broadcast(torch.ones(n)), {5: "(5,)", 9: "(9,)"})
    _differ(group, lambda n: group.all_reduce(torch.ones(n)), {1: "(1,)", 500_000: "(500000,)"})
    rows = {2: "(2,)", 3: "(3,)"}
    _differ(group, lambda n: group.all_to_all([torch.ones(1, n)] * group.size), rows)


def check_different_dtypes(group: Group) -> None:
    kinds = {torch.float32: "float32", torch.float64: "float64"}
    _differ(group, lambda kind: group.all_reduce(torch.ones(3, dtype=kind)), kinds)
    _differ(group, lambda kind: group.reduce_scatter(torch.ones(3, dtype=kind)), kinds)
    _differ(group, lambda kind: group.broadcast(torch.ones(3, dtype=kind)), kinds)
    _differ(group, lambda kind: group.all_gather(torch.ones(3, dtype=kind)), kinds)
    _differ(group, lambda kind: group.all_to_all([torch.ones(3, dtype=kind)] * group.size), kinds)


def check_different_operations(group: Group) -> None:
    ops = {"sum": "sum", "max": "max"}
    _differ(group, lambda op: group.all_reduce(torch.ones(3), op), ops)
    _differ(group, lambda op: group.reduce_scatter(torch.ones(3), op), ops)
    ways = {"ring": "ring", "halving_doubling": "halving_doubling"}
    _differ(group, lambda way: group.all_reduce(torch.ones(3), algorithm=way), ways)


def check_different_sources(group: Group) -> None:
    sources = {0: "from rank 0", 1: "from rank 1"}
    _differ(group, lambda source: group.broadcast(torch.ones(3), source), sources)


def check_different_collectives(group: Group) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: group.all_reduce(torch.ones(3)),
        "reduce_scatter": lambda: group.reduce_scatter(torch.ones(3)),
        "all_gather": lambda: group.all_gather(torch.ones(3)),
        "broadcast": lambda: group.broadcast(torch.ones(3)),
        "all_to_all": lambda: group.all_to_all([torch.ones(3)] * group.size),
        "barrier": group.barrier,
    }
    names = list(calls)
    for one, other in zip(names, [*names[1:], names[0]], strict=True):
        _differ(group, lambda name: calls[name](), {one: one, other: other})
        _differ(group, lambda name: calls[name](), {other: other, one: one})


def check_long_claims_still_tell_apart(group: Group) -> None:
    """Two shapes of very many dimensions, that differ in the last."""
    shapes = {(1,) * 100: "(1, 1, 1,", (*(1,) * 99, 2): "(1, 1, 1,"}
    _differ(group, lambda shape: group.all_reduce(torch.ones(shape)), shapes)


def _differ(group: Group, call: Callable[[Any], Any], said: dict[Any, str]) -> None:
    """The last rank calls with the second of two arguments; the error must tell both."""
    if group.size == 1:
        return
    common, odd = said
    last = group.size - 1
    argument = odd if group.rank == last else common
    what = f"rank {last} calls with {odd}, the others with {common}"
    text = require_error(CommError, lambda: call(argument), what)
    for words in (said[common], said[odd], f"rank {last}"):
        assert words in text, f"no {words!r} in {text!r}"
    salt = sum(map(ord, str(said)))  # other numbers each time: none may be left from the last
    parts = [made(rank, (64,), salt=salt) for rank in range(group.size)]
    require_equal(
        group.all_reduce(parts[group.rank].clone()), reduced(parts, "sum"), f"after {what}"
    )


CHECKS = (
    check_different_shapes,
    check_different_dtypes,
    check_different_operations,
    check_different_sources,
    check_different_collectives,
    check_long_claims_still_tell_apart,
)

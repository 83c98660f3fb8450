"""Finds where to cut a model, and how many ranks each stage gets: PipeDream's dynamic programme.

    best(block, ranks) = min over stop, r of
                         max(stage(block … stop on r ranks), best(stop, ranks − r))

From the last block to the first: the best way to put the blocks from here on onto the last ranks.
Which ranks a stage has follows from how many come after it. So its place in the network is known,
and so is its memory, which depends on how many batches are in flight from here on.

With the stages or their ranks given, the same programme has fewer choices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from farandole.errors import UserError
from farandole.layout.partition.cost import BlockProfile, Costs, Cut, PerRank, StagePlan
from farandole.layout.partition.network import Network

_MIB = 2**20


def find_cut(
    profiles: Sequence[BlockProfile],
    ranks: int,
    network: Network,
    *,
    stages: int | None = None,
    replicas: Sequence[int] | None = None,
    memory_bytes: float | None = None,
    in_flight: PerRank | None = None,
    weight_copies: PerRank | None = None,
    batches_per_sync: int = 1,
) -> Cut:
    """The cut whose slowest stage is fastest. It uses all ranks.

    `stages`: so many, each on one rank; `replicas`: the ranks of each stage; neither: free.
    `memory_bytes` is what a rank may use. `in_flight` and `weight_copies` say how many batches and
    how many times its weights a rank holds, from the number of ranks of its stage and all after it,
    and of its stage. `batches_per_sync`: (micro-)batches between two all-reduces of the weights.

    Raises `UserError` if there are more stages than blocks, or if no cut fits the memory: then it
    says by how much the smallest exceeds it.
    """
    if stages is not None and replicas is None:
        replicas = (1,) * stages
    _check(len(profiles), ranks, replicas)
    costs = Costs(
        profiles,
        ranks,
        network,
        in_flight=in_flight,
        weight_copies=weight_copies,
        batches_per_sync=batches_per_sync,
    )
    choices = _free if replicas is None else _given(replicas)
    limit_bytes = math.inf if memory_bytes is None else memory_bytes
    cut = _search(costs, choices, _SECONDS, limit_bytes)
    if cut is None:
        smallest = _search(costs, choices, _MEMORY, math.inf)
        assert smallest is not None, "without a limit there is always a cut"
        raise _does_not_fit(smallest, profiles, limit_bytes)
    return cut


def cut_by_hand(
    profiles: Sequence[BlockProfile],
    balance: Sequence[int],
    network: Network,
    *,
    replicas: Sequence[int] | None = None,
    in_flight: PerRank | None = None,
    weight_copies: PerRank | None = None,
    batches_per_sync: int = 1,
) -> Cut:
    """What a given cut costs: `balance` blocks in each stage, on one rank or on `replicas`."""
    replicas = replicas or (1,) * len(balance)
    if sum(balance) != len(profiles) or len(replicas) != len(balance) or min(balance) < 1:
        raise UserError(
            f"balance={_plus(balance)} has {sum(balance)} blocks in {len(balance)} stages; there "
            f"are {len(replicas)} stages, and the model has {len(profiles)} blocks: "
            f"{', '.join(profile.name for profile in profiles)}."
        )
    costs = Costs(
        profiles,
        sum(replicas),
        network,
        in_flight=in_flight,
        weight_copies=weight_copies,
        batches_per_sync=batches_per_sync,
    )
    bounds = list(accumulate(balance, initial=0))
    before = list(accumulate(replicas, initial=0))
    return Cut(
        tuple(
            costs.stage(bounds[index], bounds[index + 1], sum(replicas) - before[index], own)
            for index, own in enumerate(replicas)
        )
    )


class _Tail(NamedTuple):
    """The best way to go on from a block, for some ranks."""

    worst: float  # of the stages: seconds, or bytes
    uneven: float  # the sum of squares of what the stages compute; decides between equals
    stages: tuple[StagePlan, ...] = ()


class _Goal(NamedTuple):
    """What the worst stage should have as little as possible of."""

    cost: Callable[[StagePlan], float]
    floor: Callable[[StagePlan], float]  # a stage with more blocks costs no less than this


def _computing(stage: StagePlan) -> float:
    return stage.compute_seconds / stage.replicas


_SECONDS = _Goal(lambda stage: stage.seconds, _computing)
_MEMORY = _Goal(lambda stage: stage.memory_bytes, lambda stage: stage.memory_bytes)

_Choices = Callable[[int], Sequence[int]]
"""How many ranks a stage may have, by how many there are for it and all after it."""


def _free(ranks_from_here: int) -> Sequence[int]:
    return range(1, ranks_from_here + 1)


def _given(replicas: Sequence[int]) -> _Choices:
    # How many ranks there are from here on tells which stage this is.
    from_here = accumulate(reversed(replicas))
    own = dict(zip(from_here, reversed(replicas), strict=True))
    return lambda ranks_from_here: [own[ranks_from_here]] if ranks_from_here in own else []


def _search(costs: Costs, choices: _Choices, goal: _Goal, limit_bytes: float) -> Cut | None:
    blocks = len(costs.profiles)
    # Invariant: `best[first, ranks]` is the best cut of the blocks from `first` on over exactly the
    # last `ranks` ranks. It does not depend on how the blocks before are cut: a stage's place in
    # the network and its memory follow from the ranks behind it.
    best = {(blocks, 0): _Tail(0.0, 0.0)}
    for first in reversed(range(blocks)):
        for ranks in range(1, costs.ranks + 1):
            tail = _best_tail(costs, best, first, ranks, choices(ranks), goal, limit_bytes)
            if tail is not None:
                best[first, ranks] = tail
    whole = best.get((0, costs.ranks))
    return None if whole is None else Cut(whole.stages)


def _best_tail(
    costs: Costs,
    best: Mapping[tuple[int, int], _Tail],
    first: int,
    ranks: int,
    choices: Sequence[int],
    goal: _Goal,
    limit_bytes: float,
) -> _Tail | None:
    found: _Tail | None = None
    for own in choices:
        for stop in range(first + 1, len(costs.profiles) + 1):
            rest = best.get((stop, ranks - own))
            # The slowest stage decides, so a rest that is already slower cannot win.
            if rest is None or (found is not None and rest.worst > found.worst):
                continue
            stage = costs.stage(first, stop, ranks, own)
            # From here on stages only get longer, and no better.
            if stage.memory_bytes > limit_bytes:
                break
            if found is not None and goal.floor(stage) > found.worst:
                break
            cost = goal.cost(stage)
            # Where handing over sets the pace, all cuts are equal but for this.
            worst, uneven = max(cost, rest.worst), _computing(stage) ** 2 + rest.uneven
            if found is None or (worst, uneven) < (found.worst, found.uneven):
                found = _Tail(worst, uneven, (stage, *rest.stages))
    return found


def _check(blocks: int, ranks: int, replicas: Sequence[int] | None) -> None:
    if blocks < 1 or ranks < 1:
        raise UserError(f"A cut of {blocks} blocks over {ranks} ranks; both must be at least 1.")
    if replicas is None:
        return
    if len(replicas) > blocks:
        raise UserError(
            f"{len(replicas)} stages, but the model has only {blocks} blocks. Ask for at most "
            f"{blocks} stages, or give the model as smaller blocks."
        )
    if not replicas or min(replicas) < 1 or sum(replicas) != ranks:
        raise UserError(
            f"replicas={_plus(replicas)} takes {sum(replicas)} ranks, but there are {ranks}: give "
            f"each stage at least 1, and {ranks} in all."
        )


def _does_not_fit(cut: Cut, profiles: Sequence[BlockProfile], memory_bytes: float) -> UserError:
    worst = max(cut.stages, key=lambda stage: stage.memory_bytes)
    index = cut.stages.index(worst)
    names = profiles[worst.first].name
    if worst.stop - worst.first > 1:
        names += f" … {profiles[worst.stop - 1].name}"
    return UserError(
        f"No cut fits {memory_bytes / _MIB:.3g} MiB a rank. The best one, "
        f"balance={_plus(cut.balance)}, needs {worst.memory_bytes / _MIB:.3g} MiB on each rank of "
        f"stage {index} (blocks {names}): {(worst.memory_bytes - memory_bytes) / _MIB:.3g} MiB too "
        f"much. Try more stages, recompute, smaller micro-batches or fewer of them in flight."
    )


def _plus(numbers: Sequence[int]) -> str:
    return "+".join(map(str, numbers))

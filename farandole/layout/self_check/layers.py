"""Which layer is the first whose output differs: every layer's output as one number.

The sum of the magnitudes of an output does not depend on how it is cut: tiles, samples and
micro-batches add up to it. So the plain model and a layout can be compared layer by layer, wherever
the layers run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import nn

OwnPieces = Callable[[torch.Tensor], Sequence[torch.Tensor]]
"""Of a layer's output, the pieces that this rank counts."""

LayerSums = dict[str, list[float]]
"""By layer: how often it ran, and the sum of its outputs' magnitudes."""


@contextmanager
def watched(layers: Mapping[str, tuple[nn.Module, OwnPieces]]) -> Iterator[LayerSums]:
    """Inside, notes what these layers return, in the order in which they first ran."""
    seen: LayerSums = {}
    hooks = []

    def noting(name: str, own: OwnPieces) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            entry = seen.setdefault(name, [0.0, 0.0])
            entry[0] += 1
            with torch.no_grad():
                for leaf in pytree.tree_leaves(output):
                    if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                        entry[1] += sum(float(each.double().abs().sum()) for each in own(leaf))

        return note

    for name, (module, own) in layers.items():
        hooks.append(module.register_forward_hook(noting(name, own)))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def everything(output: torch.Tensor) -> Sequence[torch.Tensor]:
    return [output]


class RankSums(NamedTuple):
    """What one rank has seen; ranks of one shard see different micro-batches of the same piece."""

    shard: int
    seen: LayerSums


def first_difference(plain: LayerSums, ranks: Sequence[RankSums], close: float) -> str | None:
    """The first layer of the plain model that another sum was found for; None: all agree.

    A layer that is computed again in the backward pass runs more often, so sums are per run. A
    layer that nobody has seen, because it is inside of something recorded, is not compared.
    """
    for name, (times, total) in plain.items():
        # Ranks of one shard have seen different micro-batches of the same piece: their runs and
        # sums add up before they are divided. Shards have seen different pieces: these are added
        # afterwards.
        shards: dict[int, list[float]] = {}
        for rank in ranks:
            if name in rank.seen:
                runs, found = rank.seen[name]
                entry = shards.setdefault(rank.shard, [0.0, 0.0])
                entry[0] += runs
                entry[1] += found
        if not shards:
            continue
        expected = total / times
        pieces = [found / runs for runs, found in shards.values()]
        alike = [abs(found - expected) <= close * abs(expected) for found in (sum(pieces), *pieces)]
        # Shards hold pieces of an output, or each of them all of it.
        if not alike[0] and not all(alike[1:]):
            return name
    return None

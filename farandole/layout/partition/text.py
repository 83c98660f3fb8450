"""A cut as people read it: a table, and a line to paste in place of a bad balance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from farandole.layout.partition.cost import BlockProfile, Cut
from farandole.layout.partition.network import Network
from farandole.layout.partition.search import cut_by_hand, find_cut

_WORTH_SAYING = 1.1
"""How much slower a balance by hand must be before it is worth a line: times are measured."""


_UNEVEN = 1.5
"""How many times the mean the largest stage may have before it is worth a warning."""


def describe(cut: Cut, profiles: Sequence[BlockProfile]) -> str:
    """A table of the stages, and the predicted pace."""
    rows = [("stage", "blocks", "ranks", "compute ms", "boundary KiB", "weights MiB")]
    for index, stage in enumerate(cut.stages):
        blocks = profiles[stage.first : stage.stop]
        travels = blocks[-1].output_bytes if stage.stop < len(profiles) else 0
        rows.append(
            (
                str(index),
                blocks[0].name if len(blocks) == 1 else f"{blocks[0].name} … {blocks[-1].name}",
                str(stage.replicas),
                f"{1e3 * stage.compute_seconds:.2f}",
                f"{travels / 2**10:.1f}" if travels else "–",
                f"{sum(block.parameter_bytes for block in blocks) / 2**20:.2f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            # Names to the left, numbers to the right.
            cell.ljust(width) if column == 1 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, _pace(cut)])


def unevenness(
    cut: Cut, profiles: Sequence[BlockProfile], whole: Sequence[Mapping[str, str]], measured: bool
) -> str | None:
    """A warning, if the largest stage has more than 1.5 times the mean of all.

    `whole`: by block, what in it could not be recorded, and why: there it might have been cut.
    """
    loads = [stage.compute_seconds / stage.replicas for stage in cut.stages]
    mean = sum(stage.compute_seconds for stage in cut.stages) / sum(cut.replicas)
    if len(loads) == 1 or max(loads) <= _UNEVEN * mean:
        return None
    worst = loads.index(max(loads))
    stage = cut.stages[worst]
    blocks = range(stage.first, stage.stop)
    largest = max(blocks, key=lambda each: _seconds(profiles[each]))
    what = f"({1e3 * max(loads):.3g} ms)" if measured else "of the parameters"
    lines = [
        f"warning: an uneven cut. Stage {worst} has {max(loads) / mean:.2g} times the mean of all "
        f"stages {what}, so the others wait for it. Its largest block is {profiles[largest].name}."
    ]
    lines += [
        f"{name} stays whole, for its forward cannot be recorded: {why}."
        for name, why in whole[largest].items()
    ]
    if not measured:
        lines.append("A sample may find more blocks: pass run.trainer(…, sample=x).")
    return " ".join(lines)


def _seconds(profile: BlockProfile) -> float:
    return profile.forward_seconds + profile.backward_seconds


def suggestion(
    profiles: Sequence[BlockProfile],
    balance: Sequence[int],
    network: Network | None = None,
    *,
    replicas: Sequence[int] | None = None,
    batches_per_sync: int = 1,
) -> str | None:
    """A better balance to paste, if the one by hand is more than 10 % slower than the best.

    Without a network only the computing counts.
    """
    network = network or Network(math.inf)
    replicas = replicas or (1,) * len(balance)
    now = cut_by_hand(
        profiles, balance, network, replicas=replicas, batches_per_sync=batches_per_sync
    )
    best = find_cut(
        profiles, sum(replicas), network, replicas=replicas, batches_per_sync=batches_per_sync
    )
    if now.bottleneck_seconds <= _WORTH_SAYING * best.bottleneck_seconds:
        return None
    gain = now.bottleneck_seconds / best.bottleneck_seconds if best.bottleneck_seconds else math.inf
    better = "+".join(map(str, best.balance))
    return (
        f"balance={better} would be {gain:.2f}× as fast: its slowest stage takes "
        f"{1e3 * best.bottleneck_seconds:.2f} ms, not {1e3 * now.bottleneck_seconds:.2f} ms."
    )


def _pace(cut: Cut) -> str:
    slowest = max(cut.stages, key=lambda stage: stage.seconds)
    parts = {
        "computing": slowest.compute_seconds / slowest.replicas,
        "averaging its weights": slowest.sync_seconds,
        "handing over": slowest.boundary_seconds,
    }
    return (
        f"Predicted bottleneck: stage {cut.stages.index(slowest)}, "
        f"{1e3 * slowest.seconds:.2f} ms a micro-batch, {max(parts, key=lambda key: parts[key])}."
    )

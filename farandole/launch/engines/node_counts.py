"""--nodes and --per-node on hosts that are known: as many of them, with as many workers each."""

from __future__ import annotations

from collections.abc import Mapping

from farandole.errors import UserError
from farandole.launch.hosts import place_workers
from farandole.topology import Topology


def place_evenly(
    slots: Mapping[str, int], nodes: int, per_node: int, *, where: str, more: str
) -> Topology:
    """On the first `nodes` of the hosts in `slots`, which are those of `where`.

    Raises `UserError` naming both numbers where there are fewer; `more` says how to get more.
    """
    if len(slots) < nodes:
        raise UserError(
            f"--nodes {nodes}: {where} has {len(slots)} ({', '.join(slots)}). Ask for --nodes "
            f"{len(slots)}, or {more}"
        )
    chosen = dict(list(slots.items())[:nodes])
    for name, count in chosen.items():
        if count < per_node:
            raise UserError(
                f"--per-node {per_node}: {where} has {count} on {name}. Ask for --per-node "
                f"{min(chosen.values())}, or {more}"
            )
    return place_workers(dict.fromkeys(chosen, per_node), nodes * per_node)

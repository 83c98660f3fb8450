"""Where other hosts reach this one, and to which of them no way leads."""

from __future__ import annotations

from collections.abc import Sequence

from farandole.errors import UserError
from farandole.launch.backends.remote.channel import Channel
from farandole.launch.probes.problems import Problem
from farandole.worker.network import address_for


def own_address(
    channel: Channel, others: Sequence[str], interfaces: Sequence[str]
) -> tuple[str | None, dict[str, Problem]]:
    """The address towards the first of the others to which a way leads; None where there is none.

    The problems are those of the hosts to which none does. Raises `UserError` where this host has
    none of the `interfaces`.
    """
    if interfaces:
        return address_for(others, interfaces), {}
    address: str | None = None
    problems: dict[str, Problem] = {}
    for host in others:
        try:
            found = address_for([channel.address_of(host)])
        except UserError as error:
            problems[host] = Problem(host, "error", str(error), "")
        else:
            address = address or found
    return address, problems

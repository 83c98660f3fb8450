"""Messages to servers that this one has heard from, and does not know the address of yet.

Where a server is, the registrar's views say. What servers say to each other comes another way, and
may overtake a view: a new server brings a range here before the view is here that lists it. The
answer waits for that view. Were it thrown away, the new server would wait for it for ever, and the
range with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from farandole.server.node.state import Outgoing
from farandole.server.protocol.views import View


class UnaddressedMessages:
    """By the number of the server that they are for."""

    def __init__(self) -> None:
        self._kept: dict[int, list[Outgoing]] = {}

    def keep(self, view: View, server: int, messages: Sequence[Outgoing]) -> None:
        """Unless the server is dead: then a view without it makes up for them."""
        if not _is_dead(view, server):
            self._kept.setdefault(server, []).extend(messages)

    def take(self, view: View) -> Iterator[tuple[int, list[Outgoing]]]:
        """Those that can be sent by now."""
        for server in list(self._kept):
            if server in view.addresses:
                yield server, self._kept.pop(server)
            elif _is_dead(view, server):
                del self._kept[server]


def _is_dead(view: View, server: int) -> bool:
    """Numbers are given in the order in which servers come, and never again. So one that a view
    does not list is dead, unless all that it lists came before."""
    return server not in view.addresses and any(other > server for other in view.addresses)

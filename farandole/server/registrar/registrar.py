"""Who lives, and who holds what: the registrar, without its sockets.

It learns who came and who is lost, and writes views. The rest follows from one comparison: for
every range, the chain that the ring wants against the chain that is. Dead servers are taken out of
a chain at once; newcomers get in when the head has brought the range to them (`Reshape`). A few
ranges move at a time, so that the others go on without a pause.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from farandole.errors import UserError
from farandole.server.protocol.views import Chain, Reshape, Reshaped, View
from farandole.server.registrar.copies import ConfirmedRanges, explain_loss, missing_copies
from farandole.server.registrar.ring import place

RANGES = 32
_MOVES_AT_ONCE = 2


class Registrar:
    """`view` and `orders` are what it has to say; whoever has the sockets passes them on."""

    def __init__(self, servers: int, replicas: int, ranges: int = RANGES) -> None:
        if servers < 1:
            raise UserError(f"{servers} parameter servers hold nothing; ask for 1 or more.")
        if not 0 <= replicas < servers:
            raise UserError(
                f"{replicas} replicas beside each range's own server need {replicas + 1} servers, "
                f"and there are {servers}. Ask for more servers or fewer replicas."
            )
        self.view = View()
        self.orders: list[tuple[int, Reshape]] = []  # for which server
        self.lost: list[int] = []  # ranges whose data is gone
        self._wanted = servers
        self._replicas = replicas
        self._ranges = ranges
        self._moving: dict[int, Reshape] = {}
        self._died = 0  # servers, since all copies were there
        self._next_server = 1
        self._next_worker = 1

    @property
    def has_begun(self) -> bool:
        """Whether all servers that were to come at first are there."""
        return bool(self.view.chains)

    # Servers

    def add_server(self, address: str) -> int:
        """A server has come; returns its number."""
        number = self._next_server
        self._next_server += 1
        self._publish(addresses={**self.view.addresses, number: address})
        if not self.has_begun and len(self.view.addresses) >= self._wanted:
            chains = place(list(self.view.addresses), self._ranges, self._replicas)
            self._publish(chains=tuple(Chain(1, servers) for servers in chains))
        self._move()
        return number

    def lose_server(self, number: int) -> None:
        """A server is dead, or as good as dead. Its number is never given again."""
        if number not in self.view.addresses:
            return
        self._died = 1 if self._has_all_copies else self._died + 1
        left = {key: address for key, address in self.view.addresses.items() if key != number}
        chains = []
        for range_, chain in enumerate(self.view.chains):
            order = self._moving.get(range_)
            if number in chain.servers or (order is not None and number in order.servers):
                # The move is given up, with a new epoch. Whatever the old head or the newcomers
                # still say about it belongs to an older epoch and is not heeded.
                self._moving.pop(range_, None)
                servers = tuple(server for server in chain.servers if server != number)
                chain = Chain(chain.epoch + 1, servers)
                if not servers and range_ not in self.lost:
                    self.lost.append(range_)
            chains.append(chain)
        self._publish(addresses=left, chains=tuple(chains), lost_because=self._why(len(left)))
        self._move()

    def _why(self, alive: int) -> str:
        """Ranges are lost, if any are."""
        if not self.lost:
            return ""
        return explain_loss(
            len(self.lost),
            self._ranges,
            replicas=self._replicas,
            joined=self._next_server - 1,
            alive=alive,
            died=self._died,
        )

    def take_reshaped(self, sender: int, message: Reshaped) -> None:
        """The head of a range has moved it as ordered."""
        order = self._moving.get(message.range)
        if order is None or order.epoch != message.epoch:
            return
        # Only the head of the current chain may end a move: one that was replaced meanwhile may
        # have a snapshot that lacks acknowledged commands.
        if self.view.chains[message.range].head != sender:
            return
        del self._moving[message.range]
        chains = list(self.view.chains)
        chains[message.range] = Chain(order.epoch + 1, order.servers)
        self._publish(chains=tuple(chains))
        self._move()

    def _move(self) -> None:
        """Orders the next moves towards what the ring wants."""
        if not self.has_begun:
            return
        wanted = place(list(self.view.addresses), self._ranges, self._replicas)
        for range_, (chain, servers) in enumerate(zip(self.view.chains, wanted, strict=True)):
            # A range takes no commands while it moves, so few may move at a time.
            if len(self._moving) >= _MOVES_AT_ONCE:
                return
            if chain.head is not None and chain.servers != servers and range_ not in self._moving:
                order = Reshape(range_, chain.epoch, servers)
                self._moving[range_] = order
                self.orders.append((chain.head, order))

    @property
    def is_settled(self) -> bool:
        """Whether every range is assigned to where it belongs, as often as it should be.

        Whether those servers are alive and hold it is for them to confirm: see copies.py.
        """
        return not self._moving and self._has_all_copies

    @property
    def copies(self) -> int:
        """How many servers should hold each range."""
        return self._replicas + 1

    @property
    def _has_all_copies(self) -> bool:
        return self.has_begun and all(
            len(chain.servers) >= self.copies for chain in self.view.chains
        )

    def missing_copies(self, confirmed: Mapping[int, ConfirmedRanges]) -> int:
        """How many copies there are fewer than there should be, by what servers confirm."""
        if not self.has_begun:
            return self._ranges * self.copies
        return missing_copies(self.view, self.copies, confirmed)

    # Workers

    def add_worker(self) -> int:
        """A worker has come whose clock counts; returns its number."""
        number = self._next_worker
        self._next_worker += 1
        self._publish(members=(*self.view.members, number))
        return number

    def add_guest(self) -> int:
        """Somebody who reads and writes, and for whom nobody waits; returns its number."""
        number = self._next_worker
        self._next_worker += 1
        return number

    def admit(self, number: int) -> None:
        """A guest becomes a worker whose clock counts."""
        if number not in self.view.members:
            self._publish(members=(*self.view.members, number))

    def remove_worker(self, number: int, *, lost: bool) -> None:
        """It has left, or it is `lost`: then nothing of it is taken any more."""
        if number in self.view.members:
            gone = (*self.view.gone, number) if lost else self.view.gone
            members = tuple(member for member in self.view.members if member != number)
            self._publish(members=members, gone=gone)

    def _publish(self, **changes: object) -> None:
        self.view = replace(self.view, number=self.view.number + 1, **changes)  # type: ignore[arg-type]

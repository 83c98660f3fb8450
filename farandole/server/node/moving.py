"""Moving a range to other servers, as its head does it.

The registrar says `Reshape`. The head takes no more commands for the range, waits until the chain
is done with those it took, sends a snapshot to the newcomers, and reports when all have it. The
next view says who is head then. Nothing acknowledged can be missing from a snapshot, because
nothing is acknowledged between the snapshot and that view.
"""

from __future__ import annotations

from farandole.server.node.range import Range
from farandole.server.node.server_copy import ServerCopy
from farandole.server.node.state import REGISTRAR, NodeState, Peer
from farandole.server.protocol.messages import Got, Snapshot
from farandole.server.protocol.payload import Malformed
from farandole.server.protocol.views import Chain, Reshape, Reshaped


class Moving:
    """One server's part in moves: as the head of a range, and as a newcomer."""

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._outbox = state.outbox

    def begin(self, order: Reshape) -> None:
        copy = self._state.copies.get(order.range)
        if copy is None or copy.chain.epoch != order.epoch or copy.chain.head != self._state.me:
            return
        copy.order = order
        copy.lacking = set(order.servers) - set(copy.chain.servers)
        copy.sent_snapshots = False
        self.go_on(copy)

    def go_on(self, copy: ServerCopy) -> None:
        """Sends the snapshots once the log is empty.

        Before that a command might be acknowledged that is in no snapshot: the newcomers would
        take over the range without it.
        """
        order = copy.order
        if order is None or copy.log or copy.sent_snapshots:
            return
        copy.sent_snapshots = True
        text, tensors = copy.range.state()
        for server in sorted(copy.lacking):
            self._outbox.tell(server, Snapshot(order.range, order.epoch, text, tensors))
        if not copy.lacking:
            self._outbox.tell(REGISTRAR, Reshaped(order.range, order.epoch))

    def take_snapshot(self, sender: int, message: Snapshot) -> None:
        copy = self._state.copies.get(message.range)
        # A server that is in a chain holds everything acknowledged. An old snapshot must not
        # replace that.
        if copy is not None and copy.chain.servers and copy.chain.epoch >= message.epoch:
            return
        chains = self._state.view.chains
        if not 0 <= message.range < (len(chains) or message.range + 1):
            raise Malformed(f"there is no range {message.range}")
        if chains and chains[message.range].epoch > message.epoch:
            return  # the move that it was for has been given up
        range_ = Range.from_state(
            message.range, message.text, message.tensors, self._state.read_rule
        )
        # Outside any chain until a view says otherwise: it must not answer clients or forward
        # anything, for the head may still give the move up.
        newcomer = ServerCopy(range_, Chain(message.epoch, ()), brought_by=sender)
        newcomer.done = range_.version
        self._state.copies[message.range] = newcomer
        self._outbox.tell(sender, Got(message.range, message.epoch))

    def take_got(self, sender: Peer, message: Got) -> None:
        copy = self._state.copies.get(message.range)
        if copy is None or copy.order is None or copy.order.epoch != message.epoch:
            return
        if isinstance(sender, int):
            copy.lacking.discard(sender)
        if not copy.lacking:
            self._outbox.tell(REGISTRAR, Reshaped(message.range, message.epoch))

    def confirm_again(self, copy: ServerCopy, server: int) -> None:
        """`server` may not have heard that its snapshot is here. Once a view names the new chain
        it must have."""
        if copy.brought_by == server and not copy.chain.servers:
            self._outbox.tell(server, Got(copy.range.number, copy.chain.epoch))

    def send_snapshot_again(self, copy: ServerCopy, server: int) -> None:
        """`server` may not have got it."""
        if copy.order is not None and copy.sent_snapshots and server in copy.lacking:
            text, tensors = copy.range.state()
            snapshot = Snapshot(copy.range.number, copy.order.epoch, text, tensors)
            self._outbox.tell(server, snapshot)

"""Sockets that carry sealed messages: a server's `Port`, and a client's `Line` to it.

    Line ── a password, by PLAIN ──▶ Port                      as in admission.py
    Line ── Hello ──▶ Port                                     as in handshake.py
    Line ◀── Welcome ── Port
    Line ◀── seal, header, tensors … ──▶ Port                  as in seal.py and wire.py
    Line ◀── a notice: "unknown peer", "key", … ── Port        what the server cannot read, and why

A notice is not sealed: it is for those with whom there is no common key. So nothing is done
because of it that could do harm. "unknown peer", as a server says that was started anew, makes a
Line greet it again. A refusal is kept, to explain why nothing answers: it may come from a stranger
who has got the port for a while, and a Welcome that comes later still counts. When to give up
waiting is for the caller to say.

Whoever does not know the password is not let in, and nothing they send is kept. Frames travel in
parts of at most 256 KiB (sockets.py).

Messages can get lost: when a connection breaks, all that were under way do. Those that arrive do so
whole, once, and in the order of sending, and whoever sends again after a while loses nothing.
"""

from __future__ import annotations

from farandole.server.client.line import Line
from farandole.server.node.port import Port

__all__ = ["Line", "Port"]

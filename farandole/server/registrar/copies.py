"""How many copies of the ranges are missing, and what to say when the last copy is gone.

The registrar's view says which servers *should* hold a range. A copy counts here only when its
server has confirmed it: it was asked, it answered, and it holds the whole range in the epoch of the
chain that the view names. So a server that is dead, stuck or still without the view counts as none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping

from farandole.server.protocol.views import View

ConfirmedRanges = Mapping[int, int]
"""The ranges that a server confirms, and the epoch of each."""

_SLICE_SECONDS = 0.02


def missing_copies(view: View, copies: int, confirmed: Mapping[int, ConfirmedRanges]) -> int:
    """How many of `copies` of every range are not confirmed, by server, all ranges together."""
    missing = 0
    for range_, chain in enumerate(view.chains):
        there = [
            server
            for server in chain.servers
            if server in view.addresses and confirmed.get(server, {}).get(range_) == chain.epoch
        ]
        missing += max(0, copies - len(there))
    return missing


class Confirmations:
    """One question to all servers at a time, asked in one thread and answered in another."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._question = 0
        self._answers: dict[int, ConfirmedRanges] = {}

    def begin(self) -> int:
        """The number of a new question. Answers to earlier ones do not count any more."""
        with self._changed:
            self._question += 1
            self._answers = {}
            return self._question

    def take(self, question: int, server: int, held: ConfirmedRanges) -> None:
        with self._changed:
            # A late answer describes a state from before this question. To count it could report a
            # copy that is gone.
            if question == self._question:
                self._answers[server] = held
                self._changed.notify_all()

    def wait(
        self,
        servers: Callable[[], Collection[int]],
        seconds: float,
        is_pointless: Callable[[], bool],
    ) -> dict[int, ConfirmedRanges]:
        """The answers, when all `servers` have given theirs, or as far as they came in time."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while not self._answers.keys() >= set(servers()):
                if time.monotonic() > deadline or is_pointless():
                    break
                self._changed.wait(_SLICE_SECONDS)
            return dict(self._answers)


def explain_loss(
    lost: int, ranges: int, *, replicas: int, joined: int, alive: int, died: int
) -> str:
    """Why ranges are lost, and how many servers and replicas would have kept them.

    `joined` servers have come so far; `died` of them since all copies were there last.
    """
    what = f"{lost} of {ranges} ranges of parameters are lost: all servers that held them are dead."
    if not replicas:
        return (
            f"{what} There was no replica of them: {joined} server(s) came, {alive} are alive, and "
            "each range had one copy (--replicas 0). With --servers 2 and --replicas 1, or more of "
            "both, one server may die. Go on from the last checkpoint."
        )
    return (
        f"{what} {joined} servers came and {alive} are alive. Each range had {replicas + 1} copies "
        f"(--replicas {replicas}), and {died} servers died before the copies of the first of them "
        f"had been made again. To survive {died} deaths in such a short time give --replicas "
        f"{died} and --servers {died + 1} or more. Go on from the last checkpoint."
    )

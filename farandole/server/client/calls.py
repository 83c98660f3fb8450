"""What a client has asked for and will wait for: messages sent, and what to make of the answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from farandole.errors import CommError, DivergedError, FarandoleError
from farandole.server.client.connections import Connections
from farandole.server.client.pending import Answer
from farandole.server.client.requests import Requests
from farandole.server.protocol.messages import Cause, Command, Read

_ERRORS: Mapping[Cause, type[FarandoleError]] = MappingProxyType(
    {Cause.IMPOSSIBLE: CommError, Cause.NOT_FINITE: DivergedError}
)


class Pending:
    """Something under way. `wait` returns its result, or raises what went wrong."""

    def __init__(
        self,
        connections: Connections,
        tickets: Sequence[int],
        finish: Callable[[list[Answer]], Any],
    ) -> None:
        self._connections = connections
        self._tickets = tickets
        self._finish = finish
        self._result: Any = None
        self._over = False

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._over or self._connections.answered(self._tickets)

    def wait(self) -> Any:
        if not self._over:
            answers = self._connections.wait(self._tickets)
            self._over = True
            self._result = self._finish(answers)
        return self._result


class Calls:
    """Starts calls on one client's connections."""

    def __init__(self, connections: Connections, requests: Requests) -> None:
        self._connections = connections
        self._requests = requests

    @property
    def ranges(self) -> int:
        """How many ranges the servers hold."""
        return self._connections.ranges

    def start(
        self,
        messages: Sequence[Command | Read],
        finish: Callable[[list[Answer]], Any],
        areas: Iterable[torch.Tensor] = (),
    ) -> Pending:
        """Sends the messages. `finish` gets the answers, in their order."""
        return self.pending(self._connections.ask(messages), finish, areas)

    def run(self, messages: Sequence[Command | Read]) -> None:
        """Sends the messages and waits until all are acknowledged."""
        self.start(messages, lambda answers: None).wait()

    def pending(
        self,
        tickets: Sequence[int],
        finish: Callable[[list[Answer]], Any],
        areas: Iterable[torch.Tensor],
    ) -> Pending:
        """`areas` of shared memory are free again when all answers are there."""

        def checked(answers: list[Answer]) -> Any:
            try:
                problem = next((a.problem for a in answers if a.problem is not None), None)
                if problem is None:
                    return finish(answers)
            finally:
                # Also after a refusal: every answer is here, so no server reads or writes these
                # areas any more.
                self._requests.give_back(areas)
            raise _ERRORS[problem.cause](f"the parameter server refused: {problem.text}")

        return Pending(self._connections, tickets, checked)

    def ask(self, messages: Sequence[Command | Read]) -> list[int]:
        """Sends the messages; returns the tickets of their answers, for `pending`."""
        return self._connections.ask(messages)

    def send(self, messages: Sequence[Command | Read]) -> None:
        """Sends the messages; nobody will wait for their answers."""
        self._connections.forget(self._connections.ask(messages))

"""Messages of servers may overtake the views that say where those servers are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from farandole.server.channels import Line, Port
from farandole.server.node.range import Range
from farandole.server.node.service import Service
from farandole.server.node.state import Outgoing
from farandole.server.node.unaddressed import UnaddressedMessages
from farandole.server.protocol.control import ControlSocket
from farandole.server.protocol.messages import Got, Snapshot
from farandole.server.protocol.views import Chain, View
from farandole.server.rules import parse_rule

KEY = b"k" * 32
PATIENCE_SECONDS = 150.0


def wait_for(look: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := look()):
        assert time.monotonic() < deadline, f"in {PATIENCE_SECONDS:g} s never: {what}"
        time.sleep(0.01)
    return found


@contextmanager
def running(service: Service) -> Iterator[None]:
    stopped = threading.Event()
    thread = threading.Thread(target=service.run, args=(stopped.is_set,))
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


@pytest.mark.parametrize("begun", ["with a view", "without a view", "before its welcome"])
def test_a_range_that_a_new_server_brings_is_confirmed(begun: str) -> None:
    """The test is the registrar, and the new server 7."""
    registrar, port = ControlSocket(KEY, "tcp://127.0.0.1:*"), Port(KEY)
    context: zmq.Context[Any] = zmq.Context()
    with running(Service(registrar.address, KEY)):
        peer, hello, _ = wait_for(registrar.receive, "a hello")
        addresses = {3: hello["address"]}

        def welcome() -> None:
            registrar.send(peer, {"you": 3})

        def send_view(number: int) -> None:
            view = View(number, dict(addresses), (Chain(4, (7,)),))
            registrar.send(peer, {"view": view.to_json()})

        if begun != "before its welcome":
            welcome()
        if begun == "with a view":
            send_view(5)
        line = Line(context, KEY, hello["address"], name="server 7", server=7)
        text, tensors = Range(0, parse_rule).state()
        line.send([Snapshot(0, 4, text, tensors)])

        def has_taken() -> bool:
            """Whether the server has taken the snapshot, as it says of itself."""
            line.receive()
            said = registrar.receive()
            registrar.send(peer, {"beat": True})  # else the server would take it for dead
            return said is not None and said[1].get("facts", {}).get("messages", 0) > 0

        if begun == "before its welcome":
            welcome()
        else:
            wait_for(has_taken, "the snapshot has been taken")
        addresses[7] = port.address
        send_view(6)

        def heard() -> list[Any]:
            has_taken()
            return [message for _, messages in port.receive() for message in messages]

        assert wait_for(heard, "an answer") == [Got(0, 4)]
    line.close()
    context.term()
    port.close()
    registrar.close()


def test_nothing_is_kept_for_the_dead() -> None:
    kept = UnaddressedMessages()
    kept.keep(View(1, {1: "a", 3: "c"}), 2, [Outgoing(2, Got(0, 1))])
    kept.keep(View(1, {1: "a", 3: "c"}), 4, [Outgoing(4, Got(0, 1))])
    kept.keep(View(1, {1: "a", 3: "c"}), 6, [Outgoing(6, Got(0, 1))])
    assert list(kept.take(View(2, {1: "a", 2: "b"}))) == []
    assert list(kept.take(View(3, {1: "a", 5: "e"}))) == []
    assert list(kept.take(View(4, {1: "a", 4: "d"}))) == []
    assert list(kept.take(View(5, {6: "f"}))) == [(6, [Outgoing(6, Got(0, 1))])]
    assert list(kept.take(View(6, {6: "f"}))) == []

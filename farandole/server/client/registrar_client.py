"""A client's line to the registrar, kept by a thread of its own.

It beats while the script computes, takes in views as they come, and carries meetings.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from typing import Any

import zmq

from farandole.errors import CommError, JoinError
from farandole.server.protocol.control import BEAT_SECONDS, ControlLine
from farandole.server.protocol.views import View

_SILENCE_SECONDS = 15.0
_ANSWER_SECONDS = 2.0


class RegistrarClient:
    """`rank`: of a worker whose clock counts; None: of a guest for whom nobody waits. A worker that
    comes `late` does not count before it has entered."""

    def __init__(
        self,
        context: zmq.Context[Any],
        key: bytes,
        address: str,
        rank: int | None,
        *,
        late: bool = False,
        job: str = "",
        workers: int = 0,
    ) -> None:
        self._address = address
        self._rank = rank
        self._late = late
        self._job, self._workers = job, workers
        self._busy: str | None = None
        self._entered: str | None = None  # the mark of the epoch that it came into late
        self._control = ControlLine(context, key, address)
        # A socket of ZeroMQ belongs to one thread. So the script's thread never touches the control
        # socket: it puts messages into a deque and wakes the other thread through this pair.
        self._wake_in = context.socket(zmq.PAIR)
        self._wake_in.bind(f"inproc://registrar-client-{id(self)}")
        self._wake_out = context.socket(zmq.PAIR)
        self._wake_out.connect(f"inproc://registrar-client-{id(self)}")
        self._changed = threading.Condition()
        self._outgoing: deque[tuple[dict[str, Any], bytes]] = deque()
        self._number: int | None = None
        self._view: View | None = None
        self._met: dict[str, dict[int, bytes]] = {}
        self._missing: dict[str, list[int]] = {}
        self._heard = time.monotonic()
        self._given_up = False
        self._job_is_over = False
        self._others_are_done = False
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="registrar client", daemon=True)
        self._thread.start()

    @property
    def view(self) -> View | None:
        """The newest."""
        return self._view

    @property
    def given_up(self) -> bool:
        """The registrar has crossed this worker off: it was silent for too long."""
        return self._given_up

    @property
    def job_is_over(self) -> bool:
        """The registrar has said that it closes."""
        return self._job_is_over

    @property
    def others_are_done(self) -> bool:
        """This worker has come late, and the others have finished without it."""
        return self._others_are_done

    @property
    def silence(self) -> float:
        """Seconds since the registrar was last heard."""
        return time.monotonic() - self._heard

    def join(self, timeout: float) -> int:
        """Waits until this client has a number and a view; returns the number.

        Raises `JoinError` saying what is missing.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: (self._number is not None and self._view) or self._busy, timeout
            )
            if self._busy:
                raise JoinError(f"the parameter servers at {self._address} are {self._busy}")
            if self._number is None:
                raise JoinError(
                    f"no answer from the parameter servers' registrar at {self._address} within "
                    f"{timeout:g} s. Is it running, is this its key file, and have all workers "
                    "been started?"
                )
            if self._view is None:
                raise JoinError(
                    f"not all parameter servers have reported to {self._address} within "
                    f"{timeout:g} s. See their output."
                )
            return self._number

    def meet(self, name: str, payload: bytes, timeout: float) -> dict[int, bytes]:
        """Gives `payload` to the meeting; returns what every living rank gave, by rank."""
        self._say({"meet": name}, payload)
        with self._changed:
            arrived = self._changed.wait_for(
                lambda: name in self._met or self._given_up or self._is_deaf(), timeout
            )
            if name in self._met:
                return self._met.pop(name)
        if arrived:
            raise CommError(
                f"rank {self._rank} was given up by the registrar at {self._address}, or that has "
                "ended: it was not heard for too long."
            )
        raise CommError(
            f"rank {self._rank} waited {timeout:g} s for rank(s) {self._who_is_missing(name)} to "
            "come to the same call. Are they still at work, and does every rank make this call?"
        )

    def _who_is_missing(self, name: str) -> str:
        """As the registrar says; not for long, for something is wrong already."""
        self._say({"missing": name})
        with self._changed:
            self._changed.wait_for(lambda: name in self._missing, _ANSWER_SECONDS)
            return str(self._missing.pop(name, "that nobody knows of"))

    def announce(self, mark: str) -> None:
        """The job goes on to another epoch."""
        self._say({"mark": mark})

    def enter(self) -> str | None:
        """For one who comes late: waits until the next epoch begins, however long that takes, and
        counts from there. Returns its mark; None when the job ends before that."""
        self._say({"enter": True})
        with self._changed:
            while self._entered is None and not (
                self._job_is_over or self._others_are_done or self._given_up
            ):
                self._changed.wait(BEAT_SECONDS)
                if self._is_deaf():
                    raise CommError(
                        f"rank {self._rank} has come late and waits for the next epoch, and the "
                        f"registrar at {self._address} is silent. Has the job ended?"
                    )
            return self._entered

    def _is_deaf(self) -> bool:
        return self.silence > _SILENCE_SECONDS

    def close(self) -> None:
        """Says goodbye."""
        self._outgoing.append(({"bye": True}, b""))
        self._closing = True
        with contextlib.suppress(zmq.Again):  # the thread may have ended already
            self._wake_out.send(b"", zmq.DONTWAIT)
        self._thread.join(5)
        self._wake_out.close()

    def _say(self, message: dict[str, Any], payload: bytes = b"") -> None:
        self._outgoing.append((message, payload))
        self._wake_out.send(b"")

    def _work(self) -> None:
        poller = zmq.Poller()
        poller.register(self._control.socket, zmq.POLLIN)
        poller.register(self._wake_in, zmq.POLLIN)
        role: dict[str, Any] = {"hello": "guest"}
        if self._rank is not None:
            role = {"hello": "worker", "rank": self._rank, "late": self._late}
            role |= {"job": self._job, "of": self._workers}
        self._control.send(role)
        beat = time.monotonic()
        while not (self._closing and not self._outgoing):
            ready = dict(poller.poll(int(BEAT_SECONDS * 1000)))
            if self._wake_in in ready:
                self._wake_in.recv()
            while self._outgoing:
                self._control.send(*self._outgoing.popleft())
            # No beats before the registrar has given a number: it would answer a stranger's beat
            # with "unknown", which means that this worker was given up.
            if self._number is not None and time.monotonic() - beat >= BEAT_SECONDS:
                beat = time.monotonic()
                self._control.send({"facts": {}})
            while (said := self._control.receive()) is not None:
                self._hear(*said)
        self._control.close()
        self._wake_in.close()

    def _hear(self, message: dict[str, Any], payload: bytes) -> None:
        with self._changed:
            self._heard = time.monotonic()
            if "you" in message:
                self._number = message["you"]
            elif "view" in message:
                self._view = View.from_json(message["view"])
            elif "met" in message:
                given, begin = {}, 0
                for rank, size in zip(message["ranks"], message["sizes"], strict=True):
                    given[rank] = payload[begin : begin + size]
                    begin += size
                self._met[message["met"]] = given
            elif "missing" in message:
                self._missing[message["missing"]] = message["ranks"]
            elif "entered" in message:
                self._entered = message["entered"]
            elif "busy" in message:
                self._busy = message["busy"]
            elif "finished" in message:
                self._others_are_done = True
            elif "closed" in message:
                self._job_is_over = True
            # After a goodbye the registrar knows this worker no longer, and that is no loss.
            elif "unknown" in message and not self._closing:
                self._given_up = True
            self._changed.notify_all()

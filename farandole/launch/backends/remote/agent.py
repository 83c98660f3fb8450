"""Starts the workers of one host and looks after them: itself started there through a channel.

    launcher                     channel (ssh, …)           agent                  workers
    ┌────────────────┐  setup, orders, beats; its end   ┌───────────┐  starts   ┌────────┐
    │ HostConnection │ ───────────────────────────────▶ │ no torch  │ ────────▶ │ python │ × n
    │                │ ◀─────────────────────────────── │ one loop  │ ◀──────── │        │
    └────────────────┘   facts, output, ends of workers └───────────┘  output   └────────┘

Everything comes on standard input: so no variable of the user, and no token, is on a command line
for others to read. The end of standard input, or a long silence, means that all workers are to
stop: the launcher wants that, or is gone, or the network is. In every case no process is left here.
Should the agent itself be killed, the kernel ends the workers, and a watchdog their children.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path

import psutil

from farandole.environment import LAUNCHER
from farandole.launch.backends.remote import frames
from farandole.launch.backends.remote.frames import Frame, FrameParser, encoded
from farandole.launch.backends.remote.host_workers import HostWorkers
from farandole.launch.backends.remote.orders import End, Order, Setup
from farandole.launch.backends.remote.outgoing import Outgoing
from farandole.launch.backends.remote.supervised import CHUNK_BYTES, Supervised
from farandole.system.job_processes import IDENTITY
from farandole.system.owned_folders import OwnedFolder
from farandole.system.watchdog import Watchdog
from farandole.worker.marker_files import mark_interrupted

_POLL_SECONDS = 0.05
_LOOK_SECONDS = 0.5  # a look at all descriptors takes no longer, on a host that runs
_SETUP_SECONDS = 300.0
_PATIENCE_SECONDS = 5.0
_FACTS_SECONDS = 0.5  # as long as a connection takes where nothing is wrong, and longer
_LAST_FRAMES_SECONDS = 10.0  # for the launcher to take what is left


class Agent:
    """Of one job on this host."""

    def __init__(self, setup: Setup, incoming: int, outgoing: Outgoing, folder: Path) -> None:
        self._setup = setup
        self._folder = folder
        self._incoming: int | None = incoming
        self._outgoing = outgoing
        self._parser = FrameParser()
        self._looked = time.monotonic()
        self._silent_seconds = 0.0
        self.is_told_to_leave = False  # by a signal
        self._is_leaving = False
        self._pending: dict[int, Order] = {}
        self._workers: dict[int, Supervised] = {}
        self._starter = HostWorkers(setup, folder)
        self._has_told_facts = False

    def run(self) -> None:
        """Until the launcher wants no more of it, and all workers have ended."""
        self._has_told_facts = self._tell_facts(_FACTS_SECONDS)
        while not self._is_leaving or self._workers:
            self._pass_bytes()
            self._has_told_facts = self._has_told_facts or self._tell_facts()
            if self._outgoing.is_broken or self.is_told_to_leave or self._is_in_silence():
                self._leave()
            if self._pending and self._starter.is_ready():
                self._start_pending()
            for worker in self._workers.values():
                worker.kill_if_late()
            if not self._outgoing.is_full:
                for frame in self._starter.activity.frames(self._workers):
                    self._outgoing.put(frame)
            self._report_ended()

    def _tell_facts(self, wait_seconds: float = 0.0) -> bool:
        """The launcher sends no order before it has them. False: they are not known so far."""
        facts = self._starter.facts(wait_seconds)
        if facts is None:
            return False
        self._outgoing.put(encoded(frames.FACTS, content=facts.to_json()))
        self._outgoing.flush()
        return True

    def _is_in_silence(self) -> bool:
        """Not only the end of a stream counts: a network that fails may end none for hours."""
        seconds, now = self._setup.silence_seconds, time.monotonic()
        # A host that stood still, or was suspended, has not listened: that time does not count.
        self._silent_seconds += min(now - self._looked, _LOOK_SECONDS)
        self._looked = now
        if self._is_leaving or self._silent_seconds < seconds:
            return False
        sys.stderr.write(f"the launcher was not heard of for {seconds:g} s: workers are stopped\n")
        self._outgoing.give_up()  # else `close` would wait for somebody to take it
        return True

    def _leave(self) -> None:
        """All workers are to stop, and no other is started."""
        self._is_leaving = True
        self._pending.clear()
        for worker in self._workers.values():
            worker.stop(self._setup.grace_seconds)

    def close(self) -> None:
        """Leaves no process of the job here, and tells the launcher what is left to tell."""
        for worker in self._workers.values():
            worker.kill()
        self._starter.close()
        psutil.wait_procs(self._starter.kill_all(), timeout=_PATIENCE_SECONDS)
        self._report_ended()
        deadline = time.monotonic() + _LAST_FRAMES_SECONDS
        while not self._outgoing.is_empty and time.monotonic() < deadline:
            select.select([], [self._outgoing.descriptor], [], _POLL_SECONDS)
            self._outgoing.flush()

    def _pass_bytes(self) -> None:
        """Takes what the launcher sends and what the workers write, as far as it can be sent on."""
        poller = select.poll()
        if self._incoming is not None:
            poller.register(self._incoming, select.POLLIN)
        if not self._outgoing.is_empty:
            poller.register(self._outgoing.descriptor, select.POLLOUT)
        pipes: dict[int, int] = {}  # of which worker each is
        if not self._outgoing.is_full:
            for number, worker in self._workers.items():
                pipes |= dict.fromkeys(worker.pipes, number)
        for pipe in pipes:
            poller.register(pipe, select.POLLIN)
        for descriptor, _ in poller.poll(_POLL_SECONDS * 1000):
            if descriptor == self._incoming:
                self._take_orders()
            elif descriptor in pipes:
                self._take_output(pipes[descriptor], descriptor)
        self._outgoing.flush()

    def _take_output(self, number: int, pipe: int) -> None:
        worker = self._workers[number]
        kind = worker.pipes[pipe]
        if found := worker.read(pipe):
            self._outgoing.put(encoded(kind, number, found))

    def _take_orders(self) -> None:
        assert self._incoming is not None
        found = os.read(self._incoming, CHUNK_BYTES)
        self._silent_seconds = 0.0
        if not found:
            self._incoming = None
            self._leave()
        for frame in self._parser.feed(found):
            self._obey(frame)

    def _obey(self, frame: Frame) -> None:
        kind, number, content = frame
        worker = self._workers.get(number)
        if kind == frames.BEAT:
            self._outgoing.put(encoded(frames.BEAT))
        elif kind == frames.INTERRUPTED:
            mark_interrupted(self._folder)
        elif kind == frames.START and not self._is_leaving:
            self._pending[number] = Order.from_json(content)
        elif worker is None:  # it has ended, or was not started yet
            if self._pending.pop(number, None) is not None:
                self._tell_end(number, End(-signal.SIGTERM))
        elif kind == frames.SIGNAL:
            worker.send(int(content))
        elif kind == frames.STOP:
            worker.stop(self._setup.grace_seconds)
        elif kind == frames.KILL:
            worker.kill()

    def _start_pending(self) -> None:
        for number, order in self._pending.items():
            try:
                self._workers[number] = self._starter.start(number, order)
            except OSError as error:
                program, folder = self._setup.command[0], self._setup.folder
                text = f"cannot start {program!r} in {folder}: {error}\n"
                self._outgoing.put(encoded(frames.ERRORS, number, _bytes(text)))
                self._tell_end(number, End(127))
        self._pending.clear()

    def _report_ended(self) -> None:
        polled = {number: worker.poll() for number, worker in self._workers.items()}
        ended = {number: code for number, code in polled.items() if code is not None}
        if not ended:
            return
        # Their children first, all with one look at the system's processes: what they wrote last is
        # then in the pipes.
        self._starter.kill_children(list(ended))
        for number, code in ended.items():
            worker = self._workers.pop(number)
            for kind, content in worker.read_rest().items():
                if content:
                    self._outgoing.put(encoded(kind, number, content))
            if stacks := self._starter.activity.new_stacks(number):
                self._outgoing.put(encoded(frames.ERRORS, number, stacks))
            error = None
            with contextlib.suppress(OSError):
                error = worker.error_file.read_text(errors="replace")
            self._tell_end(number, End(code, error))

    def _tell_end(self, number: int, end: End) -> None:
        self._outgoing.put(encoded(frames.END, number, end.to_json()))
        self._outgoing.flush()


def _bytes(text: str) -> bytes:
    return text.encode(errors="backslashreplace")


def _read_setup(incoming: int) -> Setup:
    """The first frame. The launcher sends no other before it has our facts."""
    parser = FrameParser()
    deadline = time.monotonic() + _SETUP_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([incoming], [], [], left)[0]:
            break
        found = os.read(incoming, CHUNK_BYTES)
        if not found:
            sys.exit("the launcher went before it said what to run")
        for frame in parser.feed(found):
            if frame.kind == frames.SETUP:
                return Setup.from_json(frame.content)
    sys.exit(f"the launcher did not say within {_SETUP_SECONDS:g} s what to run")


def _own_streams() -> tuple[int, Outgoing]:
    """Standard input and output, for this process alone: nothing that it starts or prints, and no
    library, shall come between the frames."""
    incoming, outgoing = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return incoming, Outgoing(outgoing)


def _note_signals(agent: Agent) -> None:
    def note(*_: object) -> None:
        agent.is_told_to_leave = True

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, note)


def main() -> None:
    incoming, outgoing = _own_streams()
    outgoing.put(frames.MARK)
    outgoing.flush()
    setup = _read_setup(incoming)
    folder = OwnedFolder("agent")
    watchdog = Watchdog(
        variables={IDENTITY: setup.identity, LAUNCHER: str(os.getpid())}, folders=[folder.path]
    )
    try:
        agent = Agent(setup, incoming, outgoing, folder.path)
        _note_signals(agent)
        try:
            agent.run()
        finally:
            agent.close()
    finally:
        folder.close()
        watchdog.close()


if __name__ == "__main__":
    main()

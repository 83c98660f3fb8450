"""The launcher's end of one host: a channel, the agent behind it, and the workers there.

Two threads per host: one writes, one reads. So no host can make the launcher, or another host,
wait. Until the host has answered and was found fit, orders are kept back:

    opened ──▶ mark, facts ──▶ accepted ──▶ orders, beats ⇄ output, ends ──▶ closed
        │            │                                 │
        │            └─ unfit: refused by name         └─ lost: its workers have ended with 255
        └─ no answer in time: given up

Whether a host can take part is settled when it was accepted, refused or given up.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from farandole.launch.backends.remote import frames
from farandole.launch.backends.remote.activity_reports import ActivityReport
from farandole.launch.backends.remote.frames import Frame, encoded, read_frame, skip_to_mark
from farandole.launch.backends.remote.orders import End, Order, Setup
from farandole.launch.backends.remote.worker import RemoteWorker
from farandole.launch.host_facts import HostFacts
from farandole.launch.probes.host_check import least_offset_seconds
from farandole.launch.probes.problems import Problem, errors_among, tell_warnings
from farandole.system.orphans import tied_to_this_process

_BEATS = 10  # within the silence after which the other end counts as gone
_ENDED_SECONDS = 10.0  # for the channel's own end, once its stream has ended
_TAIL_LINES = 20

Check = Callable[[HostFacts, float], Sequence[Problem]]
"""What is wrong with a host, by its facts and by the seconds that its clock is ahead of ours."""

Explain = Callable[[int, Sequence[str]], Problem]
"""Why there is no agent behind a channel that ended with this exit code and wrote these lines."""


class HostConnection:
    """Opened at once, and from the main thread: the channel's process then ends with this one.

    `log` keeps what the channel and the agent complain about. Raises `OSError` where the channel's
    program is not there.
    """

    def __init__(
        self,
        host: str,
        words: Sequence[str],
        setup: Setup,
        check: Check,
        explain: Explain,
        advice: str,
        log: Path,
        connect_seconds: float,
    ) -> None:
        self.host = host
        self._setup = setup
        self._check = check
        self._explain = explain
        self._advice = advice
        self._log = log
        self._connect_seconds = connect_seconds
        self._lock = threading.Lock()
        self._workers: dict[int, RemoteWorker] = {}  # those whose end was not reported yet
        self._kept_back: dict[int, bytes] = {}  # their orders, until the host is accepted
        self._settled = threading.Event()
        self._is_accepted = self._is_over = False
        self.errors: Sequence[Problem] = ()  # why it cannot take part, once that is settled
        self._problem = ""
        self._unanswered = 0  # beats
        self._frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._opened = time.time()  # the other clock, too, is one that may be set
        with log.open("ab") as complaints:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=complaints,
                start_new_session=True,  # Ctrl-C reaches the launcher alone
                preexec_fn=tied_to_this_process(),
            )
        self._threads = [
            threading.Thread(target=target, name=f"{name} {host}", daemon=True)
            for target, name in ((self._write, "to"), (self._read, "from"))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_settled(self) -> bool:
        """Whether it is known if the host can take part. Becomes so, whatever happens."""
        return self._settled.is_set()

    @property
    def is_over(self) -> bool:
        """No worker can be started through it any more."""
        return self._is_over

    def start(self, worker: RemoteWorker, order: Order) -> None:
        frame = encoded(frames.START, worker.number, order.to_json())
        with self._lock:
            if self._is_over:
                worker.note_lost(self._problem)
                return
            self._workers[worker.number] = worker
            if self._is_accepted:
                self._frames.put(frame)
            else:
                self._kept_back[worker.number] = frame

    def signal(self, number: int, which: signal.Signals) -> None:
        """Nobody is there to hear it before the host is accepted."""
        if self._is_accepted:
            self._frames.put(encoded(frames.SIGNAL, number, str(int(which)).encode()))

    def stop(self, number: int) -> None:
        self._end(number, frames.STOP)

    def kill(self, number: int) -> None:
        self._end(number, frames.KILL)

    def mark_interrupted(self) -> None:
        if self._is_accepted:
            self._frames.put(encoded(frames.INTERRUPTED))

    def close(self) -> None:
        """Does not wait: the agent ends, and with it what is left of its workers."""
        with self._lock:
            if not self.is_settled:
                self._end_channel()
            self._frames.put(None)

    def join(self, deadline: float) -> None:
        """Returns when all is over. Gives up the channel at `deadline`."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            self._end_channel()
            for thread in self._threads:
                thread.join(_ENDED_SECONDS)

    def _end(self, number: int, how: bytes) -> None:
        with self._lock:
            kept_back = self._kept_back.pop(number, None)
            if kept_back is None:
                self._frames.put(encoded(how, number))
                return
            # It was never started, and the host may never answer.
            self._workers.pop(number).note_end(End(-signal.SIGTERM))

    def _write(self) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(OSError, ValueError):  # the reader sees the end as well
            _send(stdin, encoded(frames.SETUP, content=self._setup.to_json()))
            if not self._settled.wait(self._connect_seconds):
                self._give_up(f"it did not answer within {self._connect_seconds:g} s.")
            while (frame := self._next_frame()) is not None:
                _send(stdin, frame)
        with contextlib.suppress(OSError, ValueError):
            stdin.close()

    def _next_frame(self) -> bytes | None:
        try:
            return self._frames.get(timeout=self._setup.silence_seconds / _BEATS)
        except queue.Empty:
            # Counted, not timed: the launcher itself may have been suspended meanwhile.
            self._unanswered += 1
            if self._unanswered > _BEATS:
                self._give_up(f"it has not answered for {self._setup.silence_seconds:g} s.")
            return encoded(frames.BEAT)

    def _read(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        with stdout:
            try:
                if skip_to_mark(stdout):
                    self._accept(stdout)
                    while (frame := read_frame(stdout)) is not None:
                        self._take(frame)
            except ValueError as error:
                self._give_up(
                    f"it does not answer as an agent does ({error}).",
                    "Install the same version of Farandole there.",
                )
            except OSError as error:  # the disk is full, say
                self._give_up(f"what its workers write cannot be kept here: {error}.", "")
            finally:
                # Whatever happens: who is not told of the end would wait for it for ever.
                self._finish()

    def _accept(self, stdout: IO[bytes]) -> None:
        frame = read_frame(stdout)
        if frame is None:
            return
        facts = HostFacts.from_json(frame.content)
        ahead_seconds = least_offset_seconds(facts.clock_seconds, self._opened, time.time())
        problems = self._check(facts, ahead_seconds)
        tell_warnings(problems)
        with self._lock:
            if errors := errors_among(problems):
                self._note(*errors)
                self._frames.put(None)  # so the agent leaves by itself, and nothing stays there
            else:
                self._is_accepted = True
                for kept_back in self._kept_back.values():
                    self._frames.put(kept_back)
                self._kept_back.clear()
        self._settled.set()

    def _take(self, frame: Frame) -> None:
        kind, number, content = frame
        self._unanswered = 0
        if kind == frames.END:
            with self._lock:
                worker = self._workers.pop(number, None)
            if worker is not None:
                worker.note_end(End.from_json(content))
        elif kind in (frames.OUTPUT, frames.ERRORS):
            worker = self._workers.get(number)
            if worker is not None:
                worker.take_output(kind, content)
        elif kind == frames.ACTIVITY:
            worker = self._workers.get(number)
            if worker is not None:
                worker.take_report(ActivityReport.from_json(content))

    def _finish(self) -> None:
        """The stream has ended: so has the agent, or the way to it."""
        try:
            code = self._process.wait(_ENDED_SECONDS)
        except subprocess.TimeoutExpired:
            self._end_channel()
            code = self._process.wait()
        with self._lock:
            self._is_over = True
            complaints = self._complaints()
            if self._is_accepted:
                lost = f"host {self.host} was lost: the connection to its agent ended."
                self._problem = self._problem or f"{lost} {self._advice}"
                self._problem = "\n".join([*complaints, self._problem])
            elif not self.errors:
                self._note(self._explain(code, complaints))
            for worker in self._workers.values():
                worker.note_lost(self._problem)
            self._workers.clear()
            self._kept_back.clear()
            self._frames.put(None)
        self._settled.set()

    def _complaints(self) -> list[str]:
        try:
            return self._log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        except OSError:
            return []

    def _give_up(self, text: str, advice: str | None = None) -> None:
        problem = Problem(self.host, "error", text, self._advice if advice is None else advice)
        with self._lock:
            if not self._problem:
                self._note(problem)
        self._end_channel()

    def _note(self, *errors: Problem) -> None:
        """Call it with the lock."""
        if not self._is_accepted:
            self.errors = errors
        self._problem = "\n".join(map(str, errors))

    def _end_channel(self) -> None:
        """With what it has started itself, such as ssh's way through another host."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _send(stdin: IO[bytes], frame: bytes) -> None:
    stdin.write(frame)
    stdin.flush()

"""The launcher's side of a probe: starts it on a host, asks, and never waits without a limit."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import IO, Any

from farandole.errors import LaunchError
from farandole.launch.backends.remote.channel import Channel
from farandole.launch.backends.remote.frames import skip_to_mark
from farandole.launch.host_facts import HostFacts, JobFiles
from farandole.launch.hosts import HERE
from farandole.launch.probes.link_test import LinkFigures
from farandole.launch.probes.problems import Problem, no_answer
from farandole.system.orphans import tied_to_this_process

_START_SECONDS = 120.0  # to connect, and until Python has started there
_ANSWER_SECONDS = 60.0
_TEST_SECONDS = 150.0  # of a link: longer than the test's own limits
_END_SECONDS = 5.0
_CLOCK_ROUNDS = 5
_MOST_BYTES = 2**20  # of an answer


class ProbeError(LaunchError):
    """A host that cannot be asked."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


@dataclass(frozen=True)
class Address:
    """Where a host listens for a test of the link to it."""

    address: str
    port: int


class ProbeSession:
    """One host. Start it in the main thread, and ask in any one thread.

    Raises `LaunchError` where the program of the channel is not there.
    """

    def __init__(self, host: str, channel: Channel) -> None:
        self.host = host
        self._channel = channel
        self._limit_seconds = _START_SECONDS
        self._answers: queue.Queue[bytes] = queue.Queue()
        self._complaints: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (`close` closes it)
        probe = [sys.executable, "-m", "farandole.launch.probes.probe"]
        path = os.environ.get("PYTHONPATH")
        command = ["env", *([f"PYTHONPATH={path}"] if path else []), *probe]
        words = command if host == HERE else channel.words(host, command)
        try:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                start_new_session=True,  # Ctrl-C reaches the launcher alone
                preexec_fn=tied_to_this_process(),
            )
        except OSError as error:
            self._complaints.close()
            raise LaunchError(
                f"cannot start `{words[0]}` to reach host {host}: {error}. Install it here."
            ) from error
        self._thread = threading.Thread(target=self._listen, name=f"probe of {host}", daemon=True)
        self._thread.start()

    def __enter__(self) -> ProbeSession:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def facts(self, files: JobFiles) -> HostFacts:
        """Raises `ProbeError`, as all questions do."""
        said = self._ask({"do": "facts", "files": asdict(files)})
        try:
            return HostFacts.from_fields(said["facts"])
        except (ValueError, KeyError) as error:
            raise self._strange(repr(error)) from error

    def clock_offset_seconds(self) -> float:
        """How far its clock is ahead of ours: the quickest of several answers is the best.

        The other clock was read between our two readings, so their middle is wrong by at most half
        of the round trip.
        """
        best: tuple[float, float] | None = None
        for _ in range(_CLOCK_ROUNDS):
            begin, before = time.perf_counter(), time.time()
            there = float(self._ask({"do": "clock"})["clock"])
            trip = time.perf_counter() - begin
            found = (trip, there - (before + trip / 2))
            best = found if best is None else min(best, found)
        assert best is not None
        return best[1]

    def listen(self, towards: str, interfaces: tuple[str, ...], token: bytes) -> Address:
        """Makes it answer tests of links, at its own address on the way to `towards`."""
        said = self._ask(
            {
                "do": "listen",
                "towards": towards,
                "interfaces": interfaces,
                "token": token.decode(),
            }
        )
        return Address(str(said["address"]), int(said["port"]))

    def measure(self, there: Address, token: bytes, *, bandwidth: bool) -> LinkFigures:
        """The link from it to whoever listens `there`."""
        said = self._ask(
            {
                "do": "measure",
                "address": there.address,
                "port": there.port,
                "token": token.decode(),
                "bandwidth": bandwidth,
            },
            _TEST_SECONDS,
        )
        return LinkFigures(**said["figures"])

    def kill(self) -> None:
        """Gives up the connection; whoever waits for an answer gets an error."""
        self._process.kill()

    def close(self) -> None:
        """Ends the probe, and leaves nothing of it."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_END_SECONDS)
        self._thread.join(_END_SECONDS)
        self._complaints.close()

    def _ask(self, question: dict[str, Any], seconds: float | None = None) -> dict[str, Any]:
        limit = max(seconds or _ANSWER_SECONDS, self._limit_seconds)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # then it has ended, and there is no answer
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        try:
            line = self._answers.get(timeout=limit)
        except queue.Empty:
            self._process.kill()
            raise self._error(
                f"it did not answer within {limit:g} s.", self._channel.advice(self.host)
            ) from None
        if not line:
            raise self._ended()
        self._limit_seconds = 0.0  # it runs
        try:
            said = json.loads(line)
            assert isinstance(said, dict)
        except (ValueError, AssertionError):
            raise self._strange(repr(line[:200])) from None
        if "error" in said:
            raise self._error(f"{said['error']}.")
        return said

    def _error(self, text: str, advice: str = "") -> ProbeError:
        return ProbeError(Problem(self.host, "error", text, advice))

    def _strange(self, what: str) -> ProbeError:
        return self._error(
            f"its answer is not understood: {what}.",
            "Install the same version of Farandole there.",
        )

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            if skip_to_mark(answers):
                while line := answers.readline(_MOST_BYTES):
                    self._answers.put(line)
        self._answers.put(b"")

    def _ended(self) -> ProbeError:
        """Why it gave no answer."""
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait(_END_SECONDS)
        self._complaints.seek(0)
        lines = self._complaints.read().decode(errors="replace").splitlines()
        by = None if self.host == HERE else self._channel.name
        return ProbeError(no_answer(self.host, code, lines, by, self._channel.advice(self.host)))

"""Names workers that live but make no progress, with their Python stacks.

When one worker is stuck, all that need it soon make no step either: they wait for it in a
collective. So a worker also shows whether it waits for others, and the one to blame is one that
does not:

    rank 0   no step for 60 s, waits for other ranks
    rank 1   no step for 60 s, does not wait            ◀── its stack is shown, or it is ended
    rank 2   no step for 60 s, waits for other ranks

Where all wait, all stacks are shown, and nobody is overdue: each wait has a timeout of its own.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path

from farandole.environment import ACTIVITY
from farandole.launch.messages import tell, write_error
from farandole.launch.watches.exit_watch import Location, Overdue
from farandole.system.activity import STACK_SIGNAL, Seen, read_activity, stack_file
from farandole.system.process_state import handles, is_stopped

_LOOK_SECONDS = 0.5
_PAUSE_SECONDS = 5.0  # between two looks: then the launcher was stopped itself
_TOGETHER_SECONDS = 1.0  # those that stall with a worker do so within about a step
_STACK_SECONDS = 3.0  # for a stack to be written
_QUIET_SECONDS = 0.2  # after which it is whole
_MOST_STACKS = 8


class StallWatch:
    """Call `look` often. `seconds` of None: nobody is watched."""

    def __init__(self, folder: Path, seconds: float | None, *, kill: bool) -> None:
        self._folder = folder
        self._seconds = math.inf if seconds is None else seconds
        self._kill = kill
        self._begun: dict[int, float] = {}
        self._stalled: set[int] = set()  # those that were named, and have made no step since
        self._unwatched: set[int] = set()  # those of which it was said that nobody can tell
        self._looked = self._resumed = time.monotonic()

    def expect(self, rank: int) -> dict[str, str]:
        """Call it before a worker starts: the variables that it needs."""
        if self._seconds == math.inf:
            return {}
        path = self._path(rank)
        path.unlink(missing_ok=True)  # an earlier life's
        self._begun[rank] = time.monotonic()
        self._stalled.discard(rank)
        return {ACTIVITY: str(path)}

    def look(self, running: Mapping[int, Location]) -> list[Overdue]:
        """Names who has made no step for too long. Returns who is to be ended because of that."""
        now = time.monotonic()
        pause = now - self._looked
        if self._seconds == math.inf or pause < _LOOK_SECONDS:
            return []
        self._looked = now
        if pause > _PAUSE_SECONDS:  # the workers may have been stopped as well
            self._resumed = now
        seen = {rank: read_activity(self._path(rank)) for rank in running}
        self._name_unwatched([rank for rank in running if seen[rank] is None], now)
        known = {rank: each for rank, each in seen.items() if each is not None}
        since = {rank: now - max(each.stepped, self._resumed) for rank, each in known.items()}
        self._name_resumed(since)
        fresh = {rank: seconds for rank, seconds in since.items() if rank not in self._stalled}
        # Looked at a second late, and then at all of them: the ranks that wait for a stuck one made
        # their last step shortly after it. Named at once, they would be found stuck one by one,
        # without the culprit.
        if not any(seconds > self._seconds + _TOGETHER_SECONDS for seconds in fresh.values()):
            return []
        stalled = [rank for rank, seconds in since.items() if seconds >= self._seconds]
        # The invariant: a rank that waits for others is never ended, because the cause is
        # elsewhere.
        stuck = [rank for rank in stalled if _is_stuck(known[rank], running[rank])]
        self._name([rank for rank in stalled if rank not in self._stalled], stuck, known, running)
        self._stalled.update(stalled)
        if not self._kill:
            return []
        overdue = []
        for rank in stuck:
            stopped = _is_stopped(running[rank])
            why = "was stopped (SIGSTOP)" if stopped else "did not wait for another rank"
            overdue.append(Overdue(rank, f"made no step for {self._seconds:g} s, and {why}"))
        return overdue

    def _name(
        self,
        ranks: list[int],
        stuck: list[int],
        known: Mapping[int, Seen],
        running: Mapping[int, Location],
    ) -> None:
        able = []
        for rank in ranks:
            who = f"rank {rank} ({running[rank]}) has made no step for {self._seconds:g} s"
            steps = f"after {known[rank].steps}"
            if rank not in stuck:
                tell(f"{who}, {steps}: it waits for other ranks")
            elif _is_stopped(running[rank]):
                tell(f"{who}, {steps}: it is stopped (SIGSTOP), and cannot print its stack")
            elif not self._can_print(known[rank], running[rank]):
                tell(f"{who}, {steps}; the script has a use for SIGUSR2, so there is no stack")
            else:
                tell(f"{who}, {steps}, and does not wait for another rank; its stack:")
                able.append(rank)
        if not stuck:
            able = [rank for rank in ranks if self._can_print(known[rank], running[rank])]
        self._show_stacks({rank: running[rank] for rank in able[:_MOST_STACKS]})

    @staticmethod
    def _can_print(seen: Seen, location: Location) -> bool:
        """A process without a handler would die of the signal."""
        return (
            seen.prints_stacks and location.pid is not None and handles(location.pid, STACK_SIGNAL)
        )

    def _show_stacks(self, ranks: Mapping[int, Location]) -> None:
        files = {rank: stack_file(self._path(rank)) for rank in ranks}
        # The file grows with every stack that is asked for. Only what is written from here on
        # belongs to this one.
        before = {rank: _size(file) for rank, file in files.items()}
        for location in ranks.values():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(location.pid or 0, STACK_SIGNAL)
        deadline = time.monotonic() + _STACK_SECONDS
        sizes, quiet_since = before, time.monotonic()
        while time.monotonic() < deadline:
            time.sleep(_QUIET_SECONDS / 4)
            found = {rank: _size(file) for rank, file in files.items()}
            if found != sizes:
                sizes, quiet_since = found, time.monotonic()
            all_begun = all(found[rank] > before[rank] for rank in ranks)
            if all_begun and time.monotonic() - quiet_since > _QUIET_SECONDS:
                break
        for rank, file in files.items():
            text = file.read_bytes()[before[rank] :].decode(errors="replace")
            lines = text.splitlines() or [f"(no stack within {_STACK_SECONDS:g} s)"]
            write_error("".join(f"[{rank}] {line}\n" for line in lines))

    def _name_resumed(self, since: Mapping[int, float]) -> None:
        for rank in [rank for rank in self._stalled if since.get(rank, 0.0) < self._seconds]:
            self._stalled.discard(rank)
            if rank in since:
                tell(f"rank {rank} makes steps again")

    def _name_unwatched(self, ranks: list[int], now: float) -> None:
        late = [
            rank
            for rank in ranks
            if rank not in self._unwatched
            and now - max(self._begun[rank], self._resumed) > self._seconds
        ]
        if late:
            self._unwatched.update(late)
            names = f"rank{'s' * (len(late) > 1)} {', '.join(map(str, late))}"
            tell(f"--stall cannot watch {names}: no fd.init() within {self._seconds:g} s")

    def _path(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.activity"


def _is_stuck(seen: Seen, location: Location) -> bool:
    """Whether this worker itself is what holds up others."""
    return not seen.waits or _is_stopped(location)


def _is_stopped(location: Location) -> bool:
    return location.pid is not None and is_stopped(location.pid)


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0

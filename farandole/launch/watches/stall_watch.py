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

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from farandole.environment import ACTIVITY
from farandole.launch.messages import tell, write_error
from farandole.launch.watches.exit_watch import Location, Overdue
from farandole.launch.watches.progress import Progress
from farandole.system.activity import stack_file

_LOOK_SECONDS = 0.5
_PAUSE_SECONDS = 5.0  # between two looks: then the launcher was stopped itself
_TOGETHER_SECONDS = 1.0  # those that stall with a worker do so within about a step
_STACK_SECONDS = 3.0  # for a stack to be written, and for another host to say so
_QUIET_SECONDS = 0.2  # after which it is whole
_MOST_STACKS = 8


class StallWatch:
    """Call `look` often. `seconds` of None: nobody is watched."""

    def __init__(
        self,
        folder: Path,
        seconds: float | None,
        *,
        kill: bool,
        progress_of: Callable[[int, Path], Progress],
        ask: Callable[[int], None],
    ) -> None:
        """`progress_of` a worker, which on this host shows its activity in the given file; `ask`
        makes it print its stack: on this host into a file, on others to its standard error."""
        self._folder = folder
        self._progress_of = progress_of
        self._ask = ask
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
        found = {rank: self._progress_of(rank, self._path(rank)) for rank in running}
        self._name_unwatched([rank for rank in running if found[rank].seen is None], now)
        since = {
            rank: now - max(each.seen.stepped, self._resumed)
            for rank, each in found.items()
            if each.seen is not None
        }
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
        stuck = [rank for rank in stalled if _is_stuck(found[rank])]
        self._name([rank for rank in stalled if rank not in self._stalled], stuck, found, running)
        self._stalled.update(stalled)
        if not self._kill:
            return []
        overdue = []
        for rank in stuck:
            stopped = found[rank].is_stopped
            why = "was stopped (SIGSTOP)" if stopped else "did not wait for another rank"
            overdue.append(Overdue(rank, f"made no step for {self._seconds:g} s, and {why}"))
        return overdue

    def _name(
        self,
        ranks: list[int],
        stuck: list[int],
        found: Mapping[int, Progress],
        running: Mapping[int, Location],
    ) -> None:
        able = []
        for rank in ranks:
            who = f"rank {rank} ({running[rank]}) has made no step for {self._seconds:g} s"
            seen = found[rank].seen
            steps = f"after {seen.steps if seen is not None else 0}"
            if rank not in stuck:
                tell(f"{who}, {steps}: it waits for other ranks")
            elif found[rank].is_stopped:
                tell(f"{who}, {steps}: it is stopped (SIGSTOP), and cannot print its stack")
            elif not found[rank].can_print:
                tell(f"{who}, {steps}; the script has a use for SIGUSR2, so there is no stack")
            else:
                tell(f"{who}, {steps}, and does not wait for another rank; its stack:")
                able.append(rank)
        if not stuck:
            able = [rank for rank in ranks if found[rank].can_print]
        self._show_stacks({rank: running[rank] for rank in able[:_MOST_STACKS]})

    def _show_stacks(self, asked: Mapping[int, Location]) -> None:
        # The files grow with every stack that is asked for. Only what is written from here on
        # belongs to this one.
        before = sizes = {rank: self._printed_bytes(rank) for rank in asked}
        for rank in asked:
            self._ask(rank)
        deadline, quiet_since = time.monotonic() + _STACK_SECONDS, time.monotonic()
        while time.monotonic() < deadline:
            time.sleep(_QUIET_SECONDS / 4)
            found = {rank: self._printed_bytes(rank) for rank in asked}
            if found != sizes:
                sizes, quiet_since = found, time.monotonic()
            all_begun = all(found[rank] > before[rank] for rank in asked)
            if all_begun and time.monotonic() - quiet_since > _QUIET_SECONDS:
                break
        for rank, location in asked.items():
            lines = [f"(no stack within {_STACK_SECONDS:g} s)"]
            if sizes[rank] > before[rank]:
                if location.pid is None:
                    continue  # its agent has passed it on, as part of what the worker writes
                text = stack_file(self._path(rank)).read_bytes()[before[rank] :]
                lines = text.decode(errors="replace").splitlines()
            write_error("".join(f"[{rank}] {line}\n" for line in lines))

    def _printed_bytes(self, rank: int) -> int:
        return self._progress_of(rank, self._path(rank)).printed_bytes

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


def _is_stuck(found: Progress) -> bool:
    """Whether this worker itself is what holds up others."""
    return found.is_stopped or found.seen is None or not found.seen.waits

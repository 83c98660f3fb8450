"""A worker's clock, as the servers know it.

Invariant: a range hears that a clock has ended after every push of that clock, because commands to
a range arrive in order. So whoever waits for a clock sees all that was pushed in it.
"""

from __future__ import annotations

from collections.abc import Iterable

from farandole.server.client.calls import Calls
from farandole.server.client.known_tables import KnownTables
from farandole.server.node.clocks import RESTING
from farandole.server.protocol.messages import Command, Kind, Read
from farandole.server.tables import Table


class WorkerClock:
    """Counts this client's clocks, and tells the ranges of its tables."""

    def __init__(self, calls: Calls, tables: KnownTables) -> None:
        self.now = 0
        self._calls = calls
        self._tables = tables
        self._ticked: set[int] = set()  # ranges that know already that this clock has ended

    def tick(self) -> None:
        """Ends this clock: what was pushed so far is stamped with it, what follows with the next.

        Returns at once; the servers hear of it after everything that was pushed before.
        """
        # A range in which this worker has pushed nothing must hear of the tick too: others who read
        # there wait for the slowest clock.
        ranges = self._tables.used_ranges - self._ticked
        self._calls.send([Command(Kind.TICK, number, clock=self.now) for number in sorted(ranges)])
        self.now += 1
        self._ticked = set()

    def note_ticks(self, commands: Iterable[Command | Read]) -> None:
        """Pushes that end the clock in their range: `tick` need not say it there again."""
        ended = {one.range for one in commands if isinstance(one, Command) and one.ticks}
        self._ticked |= ended

    def rest(self) -> None:
        """From here to `wake` nobody waits for this worker. Returns when the servers know."""
        self._say(RESTING)

    def wake(self, clock: int) -> None:
        """Goes on at `clock`. Returns when the servers know."""
        self._say(clock)
        self.now = clock

    def _say(self, clock: int) -> None:
        ranges = sorted(self._tables.used_ranges)
        self._calls.run([Command(Kind.TICK, number, clock=clock - 1) for number in ranges])

    def rounds(self, name: str) -> int:
        """How many rounds of this table are over."""
        return self._newest_clock([self._tables.table(name)])

    def _newest_clock(self, tables: Iterable[Table]) -> int:
        reads = [Read(number, table=t.id) for t in tables for number in t.used_ranges]
        clocks: list[int] = self._calls.start(
            reads, lambda answers: [a.clock for a in answers]
        ).wait()
        return max((clock for clock in clocks if clock < RESTING), default=0)

    def catch_up(self) -> None:
        """For one who comes later: begins at the clock where the slowest is now. Until then, or
        until its first tick, nobody waits for it."""
        self.wake(max(self.now, self._newest_clock(self._tables)))

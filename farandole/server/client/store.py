"""The store as a script holds it: tables to put, get, push and add to, by rows or runs of rows.

Every call has a form that returns at once (`start_…`): what it returns is waited for later, and the
bytes travel meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from farandole.errors import UserError
from farandole.server.client.calls import Pending
from farandole.server.client.known_tables import KnownTables
from farandole.server.client.session import Session
from farandole.server.client.simulated_link import LinkToServers
from farandole.server.client.worker_clock import WorkerClock
from farandole.server.filters import Coding
from farandole.server.protocol.messages import Kind
from farandole.server.tables import Table


class Store(Session):
    """One client of a cluster of parameter servers. For one thread at a time.

    `address` is the registrar's, `key_file` the job's. A worker has a `rank`, and its clock counts;
    without one it is a guest, for whom nobody waits. `late`: it was started again.
    The `workers` of a `job` begin when all of them are there. With a `link` answers take as long as
    over that. Every wait ends after `timeout` seconds with an error that names the servers.
    """

    def __init__(
        self,
        address: str,
        key_file: str | Path,
        *,
        rank: int | None = None,
        timeout: float = 60.0,
        shared_memory: bool = True,
        late: bool = False,
        job: str = "",
        workers: int = 0,
        link: LinkToServers | None = None,
    ) -> None:
        super().__init__(
            address,
            key_file,
            rank=rank,
            timeout=timeout,
            shared_memory=shared_memory,
            late=late,
            job=job,
            workers=workers,
            link=link,
        )
        self._tables = KnownTables(self._calls)
        self._clock = WorkerClock(self._calls, self._tables)

    # Tables

    def create(
        self,
        name: str,
        rows: int,
        *,
        width: int = 1,
        dtype: str = "float32",
        rule: str = "add",
        sparse: bool = False,
        rounds: bool = False,
        backups: int = 0,
        codec: str = "",
    ) -> Table:
        """Makes a table, or finds the one of that name, which must be just like this.

        `rule` says what becomes of what is pushed: `add`, `sgd:momentum=0.9`, `adam`, … or one of
        your own. `sparse` is for many rows of which few are used at a time. With `rounds` the
        pushes of all members for one clock are applied as one, their mean; a round does not wait
        for the last `backups` of them. With a `codec` (`int8`, `bf16`, …) pushes travel as fewer
        bytes; what it leaves out of a row's push is added to the row's next one.
        """
        ranges = self._calls.ranges
        if sparse and rounds:
            raise UserError(f"table {name!r}: rounds are for dense tables.")
        if sparse:
            table = Table.sparse(
                name, rows, ranges=ranges, width=width, dtype=dtype, rule=rule, codec=codec
            )
        else:
            table = Table.dense(
                name,
                rows,
                ranges=ranges,
                width=width,
                dtype=dtype,
                rule=rule,
                rounds=rounds,
                backups=backups,
                codec=codec,
            )
        return self._tables.create(table)

    def own_name(self, name: str) -> str:
        """For a table that is this job's alone, on servers that serve one job after the other."""
        return f"{self.job} {name}".strip()

    def find(self, name: str) -> Table:
        """A table that somebody else has made. Raises `CommError` if there is none."""
        return self._tables.find(name)

    def table(self, name: str) -> Table:
        """A table that was created or found here. Raises `UserError` for another name."""
        return self._tables.table(name)

    def coding(self, name: str) -> Coding | None:
        """The table's codec at work on the pushes of this client, if it has one."""
        return self._tables.coding(name)

    def ask(self, question: str, name: str) -> torch.Tensor:
        """The answer to a question about a whole table, such as `nonzeros`: worked out where the
        rows are, and summed over the servers."""
        return self._tables.ask(question, name)

    def dots(self, name: str, pairs: Sequence[tuple[int, int]]) -> list[float]:
        """The products of pairs of a table's slots, worked out where the rows are. With the rule
        `vectors:count=8` a table has eight slots."""
        return self._tables.dots(name, pairs)

    def combine(self, name: str, combinations: Mapping[int, Mapping[int, float]]) -> None:
        """Slots become sums of multiples of slots, on the servers: {2: {0: 1.0, 1: -0.5}} is
        slot 2 ← slot 0 − ½ slot 1. All at once: each is made of what was there before."""
        self._tables.combine(name, combinations)

    def updates(self, name: str) -> int:
        """How many updates the table's rule has made: what Adam corrects its means by."""
        return self._tables.updates(name)

    def set_updates(self, name: str, count: int) -> None:
        self._tables.set_updates(name, count)

    # Values

    def put(
        self, name: str, values: torch.Tensor, *, start: int = 0, rows: torch.Tensor | None = None
    ) -> None:
        """Overwrites rows: those in `rows`, or as many as there are values from `start` on."""
        self.start_put(name, values, start=start, rows=rows).wait()

    def start_put(
        self,
        name: str,
        values: torch.Tensor,
        *,
        start: int = 0,
        rows: torch.Tensor | None = None,
        slot: int = 0,
        stamp: int = 0,
    ) -> Pending:
        """As `put`. With a `stamp` above 0 it changes nothing where the slot has had a put with
        that stamp or a later one: of two who do the same work, the first counts."""
        table = self.table(name)
        work = self._requests.commands(Kind.PUT, table, values, start, rows, slot=slot, clock=stamp)
        return self._calls.start(*work)

    def push(
        self,
        name: str,
        values: torch.Tensor,
        *,
        start: int = 0,
        rows: torch.Tensor | None = None,
        rate: float = 1.0,
    ) -> None:
        """Gives values to the table's rule: gradients, or what is to be added. A row that is named
        twice counts with the sum of both."""
        self.start_push(name, values, start=start, rows=rows, rate=rate).wait()

    add = push

    def start_push(
        self,
        name: str,
        values: torch.Tensor,
        *,
        start: int = 0,
        rows: torch.Tensor | None = None,
        rate: float = 1.0,
        ticks: bool = False,
        exact: bool = False,
    ) -> Pending:
        """As `push`. `ticks`: it is the last to these rows before this clock's end. `exact`: past
        the table's codec, as it is."""
        work = self._requests.commands(
            Kind.PUSH,
            self.table(name),
            values,
            start,
            rows,
            rate=rate,
            ticks=ticks,
            clock=self._clock.now,
            coding=None if exact else self.coding(name),
        )
        self._clock.note_ticks(work[0])
        return self._calls.start(*work)

    def get(
        self,
        name: str,
        *,
        start: int = 0,
        stop: int | None = None,
        rows: torch.Tensor | None = None,
        staleness: int | None = None,
    ) -> torch.Tensor:
        """The values of rows, `len × width`. A row that nobody has written is 0.

        With `staleness` s it waits until every member has come within s clocks of this one.
        """
        pending = self.start_get(name, start=start, stop=stop, rows=rows, staleness=staleness)
        result = pending.wait()
        assert isinstance(result, torch.Tensor)
        return result

    def start_get(
        self,
        name: str,
        *,
        start: int = 0,
        stop: int | None = None,
        rows: torch.Tensor | None = None,
        staleness: int | None = None,
        round_: int | None = None,
        slot: int = 0,
        out: torch.Tensor | None = None,
    ) -> Pending:
        """As `get`. `round_`: waits until that many rounds of the table are over. `out`: where the
        values go; it must not be touched before the end."""
        needs = -1 if staleness is None else max(0, self._clock.now - staleness)
        needs = needs if round_ is None else round_
        return self._calls.start(
            *self._requests.reads(
                self.table(name), start, stop, rows, needs, round_ is not None, slot, out
            )
        )

    def start_exchange(
        self,
        name: str,
        values: torch.Tensor,
        *,
        out: torch.Tensor,
        rate: float = 1.0,
        ticks: bool = False,
        needs: int = -1,
        rounds: bool = False,
    ) -> tuple[Pending, Pending]:
        """A push of a whole table and then a get of it, range by range: what has been applied
        travels back while the rest is still on its way. The get waits until all members have
        reached clock `needs`, or so many `rounds` of the table are over; below 0 for nobody."""
        table = self.table(name)
        commands, pushed, push_areas = self._requests.commands(
            Kind.PUSH,
            table,
            values,
            0,
            None,
            rate=rate,
            ticks=ticks,
            clock=self._clock.now,
            coding=self.coding(name),
        )
        self._clock.note_ticks(commands)
        reads, got, get_areas = self._requests.reads(table, 0, None, None, needs, rounds, 0, out)
        # The read of a range directly follows its push, so the server answers it as soon as it has
        # applied that push. All pushes first would hold up every answer until the last range has
        # been sent.
        both = [message for pair in zip(commands, reads, strict=True) for message in pair]
        tickets = self._calls.ask(both)
        return (
            self._calls.pending(tickets[::2], pushed, push_areas),
            self._calls.pending(tickets[1::2], got, get_areas),
        )

    # Time

    @property
    def clock(self) -> int:
        """How many clocks this worker has ended."""
        return self._clock.now

    @clock.setter
    def clock(self, clock: int) -> None:
        self._clock.now = clock

    def tick(self) -> None:
        """Ends this clock: what was pushed so far is stamped with it, what follows with the next.

        Returns at once; the servers hear of it after everything that was pushed before.
        """
        self._clock.tick()

    def rest(self) -> None:
        """From here to `wake` nobody waits for this worker. Returns when the servers know."""
        self._clock.rest()

    def wake(self, clock: int) -> None:
        """Goes on at `clock`. Returns when the servers know."""
        self._clock.wake(clock)

    def rounds(self, name: str) -> int:
        """How many rounds of this table are over."""
        return self._clock.rounds(name)

    def catch_up(self) -> None:
        """For one who comes later: begins at the clock where the slowest is now. Until then, or
        until its first tick, nobody waits for it."""
        self._clock.catch_up()

"""The store as a script holds it: tables to put, get, push and add to, by rows or runs of rows.

Every call has a form that returns at once (`start_…`): what it returns is waited for later, and the
bytes travel meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
import zmq

from farandole.comm.activity import Activity
from farandole.errors import CommError, DivergedError, FarandoleError, UserError, nearest
from farandole.server.client.connections import Connections
from farandole.server.client.pending import Answer
from farandole.server.client.registrar_client import RegistrarClient
from farandole.server.client.requests import Requests
from farandole.server.filters import Coding, parse_codec
from farandole.server.node.clocks import RESTING
from farandole.server.protocol.messages import DESCRIPTION, UPDATES, Cause, Command, Kind, Read
from farandole.server.protocol.seal import read_key
from farandole.server.tables import Table, id_of

_ERRORS: Mapping[Cause, type[FarandoleError]] = MappingProxyType(
    {Cause.IMPOSSIBLE: CommError, Cause.NOT_FINITE: DivergedError}
)


class Pending:
    """Something under way. `wait` returns its result, or raises what went wrong."""

    def __init__(
        self,
        conversation: Connections,
        tickets: Sequence[int],
        finish: Callable[[list[Answer]], Any],
    ) -> None:
        self._conversation = conversation
        self._tickets = tickets
        self._finish = finish
        self._result: Any = None
        self._over = False

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._over or self._conversation.answered(self._tickets)

    def wait(self) -> Any:
        if not self._over:
            answers = self._conversation.wait(self._tickets)
            self._over = True
            self._result = self._finish(answers)
        return self._result


class Store:
    """One client of a cluster of parameter servers. For one thread at a time.

    `address` is the registrar's, `key_file` the job's. A worker has a `rank`, and its clock counts;
    without one it is a guest, for whom nobody waits. `late`: it was started again.
    The `workers` of a `job` begin when all of them are there. Every wait ends after `timeout`
    seconds with an error that names the servers.
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
    ) -> None:
        key = read_key(Path(key_file))
        self._context: zmq.Context[Any] = zmq.Context()
        self._requests = Requests(shared_memory=shared_memory)
        self._liaison = RegistrarClient(
            self._context, key, address, rank, late=late, job=job, workers=workers
        )
        self.job = job
        self.clock = 0
        self._tables: dict[str, Table] = {}
        self._codings: dict[str, Coding] = {}
        self._ticked: set[int] = set()  # ranges that know that this clock has ended
        self._closed = False
        try:
            number = self._liaison.join(timeout)
            self._conversation = Connections(
                self._context, key, self._liaison, number, self._requests.arena, timeout
            )
        except BaseException:
            self._liaison.close()
            self._requests.close()
            self._context.term()
            raise

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
        ranges = self._conversation.ranges
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
        text = table.to_json()
        commands = [Command(Kind.CREATE, number, text=text) for number in table.used_ranges]
        self._start(commands, lambda answers: None).wait()
        self._tables[name] = table
        return table

    def own_name(self, name: str) -> str:
        """For a table that is this job's alone, on servers that serve one job after the other."""
        return f"{self.job} {name}".strip()

    def find(self, name: str) -> Table:
        """A table that somebody else has made. Raises `CommError` if there is none."""
        number = id_of(name)
        read = Read(number % self._conversation.ranges, table=number, text=DESCRIPTION)

        def described(answers: list[Answer]) -> Table:
            values = answers[0].values
            assert values is not None
            return Table.from_json(values.numpy().tobytes().decode())

        found: Table = self._start([read], described).wait()
        self._tables[name] = found
        return found

    def table(self, name: str) -> Table:
        if name not in self._tables:
            raise UserError(f"table {name!r} is not known here. {nearest(name, self._tables)}")
        return self._tables[name]

    def coding(self, name: str) -> Coding | None:
        """The table's codec at work on the pushes of this client, if it has one."""
        table = self.table(name)
        if table.codec and name not in self._codings:
            codec = parse_codec(table.codec)
            self._codings[name] = Coding(codec, table.rows, table.width, table.torch_dtype)
        return self._codings.get(name)

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
    ) -> Pending:
        work = self._requests.commands(Kind.PUT, self.table(name), values, start, rows, slot=slot)
        return self._start(*work)

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
            clock=self.clock,
            coding=None if exact else self.coding(name),
        )
        self._note_ticks(work[0])
        return self._start(*work)

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
        needs = -1 if staleness is None else max(0, self.clock - staleness)
        needs = needs if round_ is None else round_
        return self._start(
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
            clock=self.clock,
            coding=self.coding(name),
        )
        self._note_ticks(commands)
        reads, got, get_areas = self._requests.reads(table, 0, None, None, needs, rounds, 0, out)
        both = [message for pair in zip(commands, reads, strict=True) for message in pair]
        tickets = self._conversation.ask(both)
        return (
            self._pending(tickets[::2], pushed, push_areas),
            self._pending(tickets[1::2], got, get_areas),
        )

    def ask(self, question: str, name: str) -> torch.Tensor:
        """The answer to a question about a whole table, such as `nonzeros`: worked out where the
        rows are, and summed over the servers."""
        table = self.table(name)
        reads = [
            Read(number, table=table.id, stop=table.rows_in(number), text=question)
            for number in table.used_ranges
        ]

        def total(answers: list[Answer]) -> torch.Tensor:
            parts = [answer.values.clone() for answer in answers if answer.values is not None]
            return torch.stack(parts).sum(0)

        result = self._start(reads, total).wait()
        assert isinstance(result, torch.Tensor)
        return result

    def updates(self, name: str) -> int:
        """How many updates the table's rule has made: what Adam corrects its means by."""
        table = self.table(name)
        reads = [Read(number, table=table.id, text=UPDATES) for number in table.used_ranges]
        counts = self._start(
            reads, lambda answers: [int(a.values) for a in answers if a.values is not None]
        ).wait()
        return max(counts, default=0)

    def set_updates(self, name: str, count: int) -> None:
        table = self.table(name)
        nothing = torch.empty(0, dtype=table.torch_dtype)
        commands = [
            Command(Kind.PUT, number, table=table.id, values=nothing, text=str(count))
            for number in table.used_ranges
        ]
        self._start(commands, lambda answers: None).wait()

    # Time

    def tick(self) -> None:
        """Ends this clock: what was pushed so far is stamped with it, what follows with the next.

        Returns at once; the servers hear of it after everything that was pushed before.
        """
        ranges = {number for table in self._tables.values() for number in table.used_ranges}
        commands = [
            Command(Kind.TICK, number, clock=self.clock) for number in sorted(ranges - self._ticked)
        ]
        self._conversation.forget(self._conversation.ask(commands))
        self.clock += 1
        self._ticked = set()

    def _note_ticks(self, commands: Iterable[Command | Read]) -> None:
        ended = {one.range for one in commands if isinstance(one, Command) and one.ticks}
        self._ticked |= ended

    def rest(self) -> None:
        """From here to `wake` nobody waits for this worker. Returns when the servers know."""
        self._set_clock(RESTING)

    def wake(self, clock: int) -> None:
        """Goes on at `clock`. Returns when the servers know."""
        self._set_clock(clock)
        self.clock = clock

    def _set_clock(self, clock: int) -> None:
        ranges = {number for table in self._tables.values() for number in table.used_ranges}
        ticks = [Command(Kind.TICK, number, clock=clock - 1) for number in sorted(ranges)]
        self._start(ticks, lambda answers: None).wait()

    def rounds(self, name: str) -> int:
        """How many rounds of this table are over."""
        return self._newest_clock([self.table(name)])

    def _newest_clock(self, tables: Iterable[Table]) -> int:
        reads = [Read(number, table=t.id) for t in tables for number in t.used_ranges]
        clocks: list[int] = self._start(reads, lambda answers: [a.clock for a in answers]).wait()
        return max((clock for clock in clocks if clock < RESTING), default=0)

    def catch_up(self) -> None:
        """For one who comes later: begins at the clock where the slowest is now. Until then, or
        until its first tick, nobody waits for it."""
        self.wake(max(self.clock, self._newest_clock(self._tables.values())))

    # Others

    @property
    def liaison(self) -> RegistrarClient:
        """The line to the registrar, which knows who lives."""
        return self._liaison

    def meet(self, name: str, payload: bytes) -> dict[int, bytes]:
        """Waits for all living workers; returns what each gave, by rank."""
        return self._liaison.meet(name, payload, self._conversation.timeout)

    @property
    def members(self) -> int:
        """How many workers take part."""
        return len(self._conversation.members)

    @property
    def bytes_sent(self) -> int:
        return self._conversation.bytes_sent - self.saved_key_bytes

    @property
    def saved_key_bytes(self) -> int:
        """Of lists of rows that were not sent, because the servers knew them already."""
        return self._conversation.saved_key_bytes

    @property
    def bytes_received(self) -> int:
        return self._conversation.bytes_received

    @property
    def waited_seconds(self) -> float:
        return self._conversation.waited_seconds

    def show_waits(self, activity: Activity) -> None:
        """Tells `activity` from now on when a call waits for the servers."""
        self._conversation.activity = activity

    def buffer(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor that can be pushed from, and got into, without a copy on this side."""
        return self._requests.buffer(count, dtype)

    def close(self) -> None:
        """Leaves. What was pushed and is not acknowledged yet may not have arrived."""
        if not self._closed:
            self._closed = True
            self._conversation.close()
            self._liaison.close()
            self._requests.close()
            self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Inside

    def _start(
        self,
        messages: Sequence[Command | Read],
        finish: Callable[[list[Answer]], Any],
        areas: Iterable[torch.Tensor] = (),
    ) -> Pending:
        return self._pending(self._conversation.ask(messages), finish, areas)

    def _pending(
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
                self._requests.give_back(areas)
            raise _ERRORS[problem.cause](f"the parameter server refused: {problem.text}")

        return Pending(self._conversation, tickets, checked)

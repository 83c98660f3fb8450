"""The tables that a client knows: made, found, described, and asked about as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from farandole.errors import UserError, nearest
from farandole.server.client.calls import Calls
from farandole.server.client.pending import Answer
from farandole.server.filters import Coding, parse_codec
from farandole.server.protocol.messages import DESCRIPTION, DOTS, UPDATES, Command, Kind, Read
from farandole.server.tables import Table, id_of
from farandole.server.vector_algebra import Combinations, write_combinations, write_pairs


class KnownTables:
    """One client's tables, by name."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._tables: dict[str, Table] = {}
        self._codings: dict[str, Coding] = {}

    def __iter__(self) -> Iterator[Table]:
        return iter(self._tables.values())

    @property
    def used_ranges(self) -> set[int]:
        """The ranges in which any of the tables has rows."""
        return {number for table in self for number in table.used_ranges}

    def create(self, table: Table) -> Table:
        """Makes a table, or finds the one of that name, which must be just like this."""
        text = table.to_json()
        self._calls.run([Command(Kind.CREATE, number, text=text) for number in table.used_ranges])
        self._tables[table.name] = table
        return table

    def find(self, name: str) -> Table:
        """A table that somebody else has made. Raises `CommError` if there is none."""
        number = id_of(name)
        read = Read(number % self._calls.ranges, table=number, text=DESCRIPTION)

        def described(answers: list[Answer]) -> Table:
            values = answers[0].values
            assert values is not None
            return Table.from_json(values.numpy().tobytes().decode())

        found: Table = self._calls.start([read], described).wait()
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

        result = self._calls.start(reads, total).wait()
        assert isinstance(result, torch.Tensor)
        return result

    def dots(self, name: str, pairs: Sequence[tuple[int, int]]) -> list[float]:
        """The products of pairs of slots, added up over the servers."""
        found: list[float] = self.ask(f"{DOTS}{write_pairs(pairs)}", name).tolist()
        return found

    def combine(self, name: str, combinations: Combinations) -> None:
        """Slots of all rows become sums of multiples of slots."""
        table = self.table(name)
        text = write_combinations(combinations)
        self._calls.run(
            [
                Command(Kind.COMBINE, number, table=table.id, text=text)
                for number in table.used_ranges
            ]
        )

    def updates(self, name: str) -> int:
        """How many updates the table's rule has made: what Adam corrects its means by."""
        table = self.table(name)
        reads = [Read(number, table=table.id, text=UPDATES) for number in table.used_ranges]
        counts = self._calls.start(
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
        self._calls.run(commands)

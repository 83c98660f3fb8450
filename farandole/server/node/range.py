"""A range: the unit of sharding, of replication and of time.

It is a state machine. Replicas that apply the same commands in the same order hold the same bits,
so all that a chain must do is to keep the order. It knows its tables, what it has had from whom (a
command that comes twice counts once), and how far the members are.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from farandole.errors import UserError
from farandole.server.node.clocks import RESTING, Clocks
from farandole.server.node.table_shard import TableShard
from farandole.server.protocol.messages import Command, Kind, Problem, Read
from farandole.server.protocol.payload import Malformed
from farandole.server.rules import Rule
from farandole.server.tables import Table

_NO_STATE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What comes of reading JSON and tensors that are no state of a range."""


class Range:
    """`apply` is all that changes it."""

    def __init__(self, number: int, read_rule: Callable[[str], Rule]) -> None:
        self.number = number
        self.version = 0  # how many commands it has applied
        self.clocks = Clocks()
        self.shards: dict[int, TableShard] = {}
        self._had: dict[int, int] = {}  # the number of each sender's last command
        self._read_rule = read_rule

    def has_had(self, message: Command | Read) -> bool:
        return message.number <= self._had.get(message.sender, 0)

    def has_missed_before(self, command: Command) -> bool:
        """Whether the command before this one of the same sender has not come."""
        return command.number > self._had.get(command.sender, 0) + 1

    def is_early(self, command: Command) -> bool:
        """Whether it belongs to a round that has not begun here.

        Its sender has seen that round end, at a head that died before its successor knew. Those
        whose pushes are missing will send them again.
        """
        shard = self.shards.get(command.table) if command.kind == Kind.PUSH else None
        return shard is not None and shard.table.rounds and command.clock > shard.round

    def problem_with(
        self, message: Command | Read, *, is_forwarded: bool = False
    ) -> Problem | None:
        """Why this cannot be done; None if it can. Changes nothing.

        `is_forwarded`: the head has looked already whether values are finite.
        """
        if isinstance(message, Command):
            if message.kind in (Kind.TICK, Kind.VOID):
                return None
            if message.kind == Kind.MEMBERS:
                return _problem_with_members(message.text)
            if message.kind == Kind.CREATE:
                return self._problem_with_table(message.text)
        shard = self.shards.get(message.table)
        if shard is None:
            known = ", ".join(repr(shard.table.name) for shard in self.shards.values())
            return Problem(
                f"there is no such table here. Known: {known or 'none'}. Create it first."
            )
        return shard.problem_with(message, finite=not is_forwarded)

    def _problem_with_table(self, text: str) -> Problem | None:
        try:
            table = Table.from_json(text)
            rule = self._read_rule(table.rule)
        except UserError as error:
            return Problem(str(error))
        if not table.torch_dtype.is_floating_point and (table.rounds or not rule.takes_integers):
            why = "rounds take the mean" if table.rounds else f"{table.rule!r} makes fractions"
            return Problem(
                f"table {table.name!r} cannot be of {table.dtype}: {why}. Use float32, say."
            )
        known = self.shards.get(table.id)
        if known is not None and known.table != table:
            now, asked = vars(known.table), vars(table)
            other = ", ".join(
                f"{k}={now[k]!r}, not {asked[k]!r}" for k in now if now[k] != asked[k]
            )
            return Problem(f"table {table.name!r} exists already, with {other}.")
        return None

    def apply(self, command: Command) -> None:
        """A command without problems, that it has not had before."""
        # The version counts every command, void ones too: it is the index by which the chain
        # forwards.
        self.version += 1
        if command.sender:
            self._had[command.sender] = command.number
        if command.kind == Kind.CREATE:
            table = Table.from_json(command.text)
            if table.id not in self.shards:
                rule = self._read_rule(table.rule)
                self.shards[table.id] = TableShard(table, self.number, rule)
        elif command.kind == Kind.MEMBERS:
            self.clocks.set_members(json.loads(command.text))
            self._end_rounds()
        elif command.kind == Kind.PUT:
            self.shards[command.table].put(command)
        elif command.kind == Kind.COMBINE:
            self.shards[command.table].combine(command)
        elif command.kind == Kind.PUSH:
            shard = self.shards[command.table]
            if shard.push(command) and shard.table.rounds:
                self._end_rounds()
        if command.ticks or command.kind == Kind.TICK:
            self.clocks.tick(command.sender, command.clock)
            # A member that rests holds up no round. It may have been the last that one waited for.
            if command.clock >= RESTING - 1:
                self._end_rounds()

    def _end_rounds(self) -> None:
        """If all who are waited for have given. Before anybody is a member, all are."""
        for shard in self.shards.values() if self.clocks.members else ():
            if shard.table.rounds:
                shard.end_round(self.clocks.active)

    def is_far_enough(self, read: Read) -> bool:
        """Whether what it must see has arrived, its sender's own commands above all."""
        if not self.has_had(read):
            return False
        if read.needs < 0:
            return True
        if read.rounds:
            shard = self.shards.get(read.table)
            return shard is not None and shard.round >= read.needs
        return self.clocks.slowest >= read.needs

    def round_of(self, table: int) -> int:
        shard = self.shards.get(table)
        return shard.round if shard is not None else 0

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards.values())

    def state(self) -> tuple[str, tuple[torch.Tensor, ...]]:
        """As a snapshot has it. The tensors are the range's own."""
        shards, tensors = [], []
        for shard in self.shards.values():
            numbers, held = shard.state()
            shards.append({**numbers, "held": len(held)})
            tensors += held
        state = {
            "version": self.version,
            "clocks": self.clocks.state(),
            "had": [[sender, number] for sender, number in self._had.items()],
            "shards": shards,
        }
        return json.dumps(state), tuple(tensors)

    @classmethod
    def from_state(
        cls,
        number: int,
        text: str,
        tensors: tuple[torch.Tensor, ...],
        read_rule: Callable[[str], Rule],
    ) -> Range:
        """Raises `Malformed`."""
        try:
            return cls._from_state(number, json.loads(text), tensors, read_rule)
        except (*_NO_STATE, UserError) as error:
            raise Malformed(f"{text[:80]!r} is no state of a range: {error!r}") from error

    @classmethod
    def _from_state(
        cls,
        number: int,
        state: dict[str, Any],
        tensors: tuple[torch.Tensor, ...],
        read_rule: Callable[[str], Rule],
    ) -> Range:
        range_ = cls(number, read_rule)
        range_.version = int(state["version"])
        range_.clocks = Clocks.from_state(state["clocks"])
        range_._had = {int(sender): int(last) for sender, last in state["had"]}
        left = list(tensors)
        for numbers in state["shards"]:
            table = Table.from_json(numbers["table"])
            shard = TableShard(table, number, read_rule(table.rule))
            mine, left = left[: numbers["held"]], left[numbers["held"] :]
            shard.load_state(numbers, mine)
            range_.shards[table.id] = shard
        return range_


def _problem_with_members(text: str) -> Problem | None:
    try:
        members = json.loads(text)
    except (ValueError, RecursionError):
        members = None
    if not isinstance(members, list) or not all(type(member) is int for member in members):
        return Problem(f"{text[:80]!r} is no list of members.")
    return None

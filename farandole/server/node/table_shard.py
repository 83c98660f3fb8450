"""One table's rows in one range: the weights, the rule's state, and a round under way.

Memory is taken when the first value is written: a row that nobody has written is 0, and costs
nothing but address space until its page is touched.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import torch

from farandole.comm.tensors import is_finite
from farandole.errors import UserError
from farandole.server.filters import decode, parse_codec
from farandole.server.protocol.messages import Cause, Command, Kind, Problem, Read
from farandole.server.rules import Rule
from farandole.server.tables import Table
from farandole.server.vector_algebra import (
    combine,
    products,
    read_combinations,
    read_pairs,
)

_COUNT = re.compile("[0-9]{1,18}")  # of updates
Where = slice | torch.Tensor
"""Rows of a shard: a run of them, or a list."""


class TableShard:
    """Changes by `put` and `push`, which every replica makes in the same order."""

    def __init__(self, table: Table, range_: int, rule: Rule) -> None:
        self.table = table
        self.rows = table.rows_in(range_)
        self.round = 0
        self.steps = 0
        self.late = 0  # pushes that came after their round was over
        self._rule = rule
        self._codec = parse_codec(table.codec) if table.codec else None
        self._tensors: list[torch.Tensor] = []  # the weights, then the rule's slots
        self._sum: torch.Tensor | None = None  # of the pushes of this round
        self._given: dict[int, float] = {}  # who has pushed in this round, and with which rate
        self._stamps: dict[int, int] = {}  # of puts to slots that had one
        self._lent: list[Callable[[], bool]] = []  # whether each reader of the weights still reads

    def problem_with(self, message: Command | Read, *, finite: bool = True) -> Problem | None:
        """Why this cannot be done here; None if it can. `finite`: looks at the values too."""
        place = self._problem_with_place(message)
        if place is not None or isinstance(message, Read):
            return place
        if message.kind == Kind.COMBINE:
            return self._problem_with_combination(message)
        return self._problem_with_values(message, finite)

    def _problem_with_place(self, message: Command | Read) -> Problem | None:
        count = _count(message)
        if message.rows is None:
            if not 0 <= message.start <= message.stop <= self.rows:
                return self._no_such_rows(message.start, message.stop)
        else:
            if message.rows.dtype != torch.int64 or message.rows.dim() != 1:
                return self._problem(": a list of rows must be int64.")
            if count and not 0 <= int(message.rows.min()) <= int(message.rows.max()) < self.rows:
                return self._no_such_rows(int(message.rows.min()), int(message.rows.max()) + 1)
        if not 0 <= message.slot <= len(self._rule.slots):
            return self._problem(
                f" keeps {len(self._rule.slots)} states under {self.table.rule!r}; there is no "
                f"{message.slot}."
            )
        return None

    def _problem_with_values(self, message: Command, finite: bool) -> Problem | None:
        width, dtype = self.table.width, self.table.torch_dtype
        count = _count(message)
        try:
            values = self._values(message)
        except UserError as error:
            return self._problem(f": {error}")
        if values is None or values.dtype != dtype or values.numel() != count * width:
            got = "nothing" if values is None else f"{values.numel()} of {values.dtype}"
            return self._problem(
                f": {count} rows × {width} of {dtype} were announced, and {got} came."
            )
        if finite and values.is_floating_point() and not is_finite(values):
            return self._problem(": the values hold NaN or infinity.", Cause.NOT_FINITE)
        if message.kind == Kind.PUT and message.text and not _COUNT.fullmatch(message.text):
            return self._problem(f": {message.text!r} is not a number of updates.")
        if not math.isfinite(message.rate):
            said = f": NaN or infinity cannot be a rate: {message.rate}."
            return self._problem(said, Cause.NOT_FINITE)
        return self._problem_with_memory()

    def _problem_with_combination(self, message: Command) -> Problem | None:
        if not self.table.torch_dtype.is_floating_point:
            return self._problem(f" is of {self.table.dtype}, and sums of multiples are fractions.")
        try:
            read_combinations(message.text, self._slots)
        except UserError as error:
            return self._problem(f": {error}")
        return self._problem_with_memory()

    def _problem_with_memory(self) -> Problem | None:
        """Takes it, if this is the first value: no value can be refused for that later."""
        try:
            self._take_memory()
        except (MemoryError, OverflowError, RuntimeError, TypeError) as error:
            needed = self.rows * self.table.width * self.table.torch_dtype.itemsize
            self._tensors = []
            return self._problem(
                f": there is no memory for {1 + len(self._rule.slots)} × {needed} bytes on this "
                f"server ({str(error)[:80]})."
            )
        return None

    def _problem(self, text: str, cause: Cause = Cause.IMPOSSIBLE) -> Problem:
        return Problem(f"table {self.table.name!r}{text}", cause)

    def _values(self, command: Command) -> torch.Tensor | None:
        """What it brings, decoded. Raises `UserError` if it cannot be.

        A push of numbers as they are is as good, whatever the codec.
        """
        values = command.values
        if self._codec is None or values is None or command.kind != Kind.PUSH:
            return values
        if values.dtype != torch.uint8:
            return values
        shape = (_count(command) * self.table.width,)
        return decode(self._codec, values, shape, self.table.torch_dtype)

    def _no_such_rows(self, start: int, stop: int) -> Problem:
        return self._problem(
            f" has {self.rows} rows in this range; {start} to {stop - 1} are not all among them."
        )

    def read(self, message: Read) -> torch.Tensor:
        """The values, 2-D; a view of the weights themselves where that is possible."""
        where = _where(message)
        if not self._tensors:
            count = where.stop - where.start if isinstance(where, slice) else where.numel()
            initial = self._rule.initial(self._rule.slots[message.slot - 1]) if message.slot else 0
            return torch.full((count, self.table.width), initial, dtype=self.table.torch_dtype)
        values = self._tensors[message.slot][where]
        return values.clone() if message.slot else values  # only weights are ever lent

    def lend(self, still_read: Callable[[], bool]) -> None:
        """Views of the weights are being sent; they must not change while `still_read()`."""
        self._lent = [*(reads for reads in self._lent if reads()), still_read]

    def put(self, command: Command) -> None:
        """One with a stamp that is not newer than the slot's comes too late, and changes nothing:
        its sender was given up, and another has done its work."""
        if command.clock > 0:
            if command.clock <= self._stamps.get(command.slot, 0):
                return
            self._stamps[command.slot] = command.clock
        self._own()
        target = self._tensors[command.slot]
        target[_where(command)] = self._matrix(command)
        if command.text:
            self.steps = int(command.text)

    def combine(self, command: Command) -> None:
        """Slots become sums of multiples of slots. Readers of the weights keep the old ones."""
        self._take_memory()
        combine(self._tensors, read_combinations(command.text, self._slots))
        self._lent = []

    def products(self, text: str) -> torch.Tensor:
        """Of pairs of slots, over the rows of this range. Raises `UserError`."""
        pairs = read_pairs(text, self._slots)
        if not self._tensors:
            return torch.zeros(len(pairs), dtype=torch.float64)
        return products(self._tensors, pairs)

    @property
    def _slots(self) -> int:
        return 1 + len(self._rule.slots)

    def push(self, command: Command) -> bool:
        """Gives values to the rule; says whether they counted."""
        if self.table.rounds:
            return self._give(command)
        self._update(_where(command), self._matrix(command), command.rate)
        return True

    def _give(self, command: Command) -> bool:
        """To the mean of this round. One that is late is only missed."""
        # All replicas judge this alike, because the round is part of the replicated state. A push
        # that is late still counts as had: its sender must not send it again.
        if command.clock != self.round or command.sender in self._given:
            self.late += 1
            return False
        if self._sum is None:
            # Half precision is added up in float32, and the mean rounded once: numbers that are
            # small beside the sum count too, and all replicas round alike.
            dtype = torch.promote_types(self.table.torch_dtype, torch.float32)
            self._sum = torch.zeros(self.rows, self.table.width, dtype=dtype)
        values, where = self._matrix(command), _where(command)
        if isinstance(where, slice):
            self._sum[where] += values
        else:
            self._sum.index_add_(0, where, values.to(self._sum.dtype))
        self._given[command.sender] = command.rate
        return True

    def end_round(self, members: frozenset[int]) -> bool:
        """Applies the mean of a round if enough members have given; says whether it did."""
        missing = len(members - self._given.keys())
        if not self._given or self._sum is None or missing > self.table.backups:
            return False
        mean = self._sum.div_(len(self._given)).to(self.table.torch_dtype)
        # The largest rate, not that of the last push: which one came last differs from run to run.
        self._update(slice(0, self.rows), mean, max(self._given.values()))
        self._sum.zero_()
        self._given.clear()
        self.round += 1
        return True

    def _update(self, where: Where, gradient: torch.Tensor, rate: float) -> None:
        self._own()
        self.steps += 1
        weight, *state = [tensor[where] for tensor in self._tensors]
        self._rule.update(weight, gradient, state, rate, self.steps)
        if not isinstance(where, slice):  # those were copies
            for tensor, rows in zip(self._tensors, (weight, *state), strict=True):
                tensor[where] = rows

    def _matrix(self, command: Command) -> torch.Tensor:
        values = self._values(command)
        assert values is not None
        return values.view(-1, self.table.width)

    def _take_memory(self) -> None:
        if not self._tensors:
            shape = (self.rows, self.table.width)
            self._tensors = [torch.zeros(shape, dtype=self.table.torch_dtype)]
            for slot in self._rule.slots:
                initial = self._rule.initial(slot)
                filled = torch.zeros if not initial else torch.ones
                tensor = filled(shape, dtype=self.table.torch_dtype)
                self._tensors.append(tensor.mul_(initial) if initial else tensor)

    def _own(self) -> None:
        """Before a change: there is memory, and nobody is reading it any more."""
        self._take_memory()
        if any(reads() for reads in self._lent):
            # Copy on write: zmq may still read the old weights. They live as long as its frames do.
            self._tensors = [self._tensors[0].clone(), *self._tensors[1:]]
        self._lent = []

    @property
    def nbytes(self) -> int:
        held = [*self._tensors, self._sum] if self._sum is not None else self._tensors
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def state(self) -> tuple[dict[str, object], list[torch.Tensor]]:
        """Everything, for a replica."""
        numbers = {
            "table": self.table.to_json(),
            "round": self.round,
            "steps": self.steps,
            "late": self.late,
            "stamps": [[slot, stamp] for slot, stamp in self._stamps.items()],
            "given": [[member, rate] for member, rate in self._given.items()],
            "tensors": len(self._tensors),
            "summing": self._sum is not None,
        }
        tensors = [*self._tensors, *([self._sum] if self._sum is not None else [])]
        return numbers, [tensor.reshape(-1) for tensor in tensors]

    def load_state(self, numbers: dict[str, object], tensors: list[torch.Tensor]) -> None:
        given = numbers["given"]
        if not isinstance(given, list):
            raise TypeError("who has given is no list")
        self.round, self.steps = int(str(numbers["round"])), int(str(numbers["steps"]))
        self.late = int(str(numbers["late"]))
        self._given = {int(member): float(rate) for member, rate in given}
        stamps = numbers["stamps"]
        if not isinstance(stamps, list):
            raise TypeError("the stamps are no list")
        self._stamps = {int(slot): int(stamp) for slot, stamp in stamps}
        shaped = [tensor.clone().view(self.rows, self.table.width) for tensor in tensors]
        self._sum = shaped.pop() if numbers["summing"] else None
        if len(shaped) not in (0, 1 + len(self._rule.slots)):
            raise ValueError(f"{len(shaped)} tensors are not the state of {self.table.rule!r}")
        if any(tensor.dtype != self.table.torch_dtype for tensor in shaped):
            raise ValueError(f"the tensors are not of {self.table.dtype}")
        self._tensors = shaped


def _where(message: Command | Read) -> Where:
    return slice(message.start, message.stop) if message.rows is None else message.rows


def _count(message: Command | Read) -> int:
    return message.stop - message.start if message.rows is None else message.rows.numel()

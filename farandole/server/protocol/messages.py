"""What clients, servers and replicas say to one another. Pure data.

    client ── Command, Read ──▶ server ── Ack, Data, Refused, Moved ──▶ client
    server ── Forward, Snapshot ──▶ the next replica ── Done, Behind, Got ──▶ server

Every message is about one range. Replicas heed one another only while they are in the same epoch
of the range's chain: who thinks that it is the last, and is not any more, must not say "done".

Tensors in messages are flat, contiguous and on the CPU, and whoever gets one must not write to it:
it may lie in memory that the sender still reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import torch

UPDATES: Final = "updates"
"""The question how many updates a table's rule has made."""


DESCRIPTION: Final = "description"
"""The question what kind of table this is: JSON, as bytes."""


DOTS: Final = "dots "
"""How a question for products of vectors begins. JSON follows: pairs of slots."""


class Kind(IntEnum):
    """What a command does to a range."""

    CREATE = 1  # a table, described by `text`
    PUT = 2  # overwrites values, and the count of updates if `text` says one
    PUSH = 3  # gives values to the table's rule
    TICK = 4  # the sender has ended a clock
    MEMBERS = 5  # who takes part, from the registrar; the head of a chain writes it itself
    VOID = 6  # what a refused command becomes, so that the count of commands has no gap
    COMBINE = 7  # slots become sums of multiples of slots, as `text` says (JSON)


class Cause(IntEnum):
    """Why something was refused: what the error is that the asker gets."""

    IMPOSSIBLE = 0  # what was asked cannot be done
    NOT_FINITE = 1  # there is a NaN or an infinity in it: training has diverged


@dataclass(frozen=True, slots=True)
class Problem:
    """Why something is refused, for the program and for whoever reads it."""

    text: str
    cause: Cause = Cause.IMPOSSIBLE


@dataclass(slots=True)
class Command:
    """Changes a range. `number` counts a sender's commands to this range from 1, without gaps."""

    kind: Kind
    range: int
    sender: int = 0
    number: int = 0
    ticket: int = 0  # what the answer refers to
    table: int = 0
    start: int = 0  # rows from start to stop, as this range counts them, …
    stop: int = 0
    rows: torch.Tensor | None = None  # … or these rows: int64, sorted, each once
    values: torch.Tensor | None = None
    slot: int = 0  # 0: the weights; else the rule's state
    rate: float = 1.0
    clock: int = 0  # of the sender; of a PUT, its stamp: above 0 it overwrites older stamps only
    ticks: bool = False  # and with this the sender ends that clock
    text: str = ""
    cause: Cause = Cause.IMPOSSIBLE  # of a void one


@dataclass(slots=True)
class Read:
    """Asks a range for values, once its clocks have come far enough."""

    range: int
    sender: int = 0
    number: int = 0  # of the sender's last command to this range, which must be in what it reads
    ticket: int = 0
    table: int = 0
    start: int = 0
    stop: int = 0
    rows: torch.Tensor | None = None
    slot: int = 0
    needs: int = -1  # the clock that all members must have reached; below 0: none
    rounds: bool = False  # `needs` counts the table's rounds instead
    view: int = 0  # the sender's: who are "all members" is known to nobody with an older one
    text: str = ""  # a question, whose answer is wanted instead of the values
    into: torch.Tensor | None = None
    """Shared memory of the client where the answer may be written, in place of being sent."""


@dataclass(frozen=True, slots=True)
class Ack:
    """The command is in every replica. `clock` is the table's round, where it has rounds."""

    ticket: int
    clock: int = 0


@dataclass(frozen=True, slots=True)
class Data:
    ticket: int
    values: torch.Tensor | None = None
    clock: int = 0  # the slowest member's when this was read


@dataclass(frozen=True, slots=True)
class Refused:
    """What was asked cannot be done, and asking again will not help."""

    ticket: int
    problem: Problem


@dataclass(frozen=True, slots=True)
class Moved:
    """Not the head of this range's chain: ask the one in view `epoch` or later."""

    ticket: int
    range: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Forward:
    """The `index`-th command of a range, for the next replica."""

    range: int
    epoch: int
    index: int
    command: Command


@dataclass(frozen=True, slots=True)
class Done:
    """Every replica from here to the end of the chain has all commands up to `index`."""

    range: int
    epoch: int
    index: int


@dataclass(frozen=True, slots=True)
class Behind:
    """A command is missing between `index` and what came: send again from there."""

    range: int
    epoch: int
    index: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A whole range: everything that is not a tensor in `text` (JSON), and the tensors."""

    range: int
    epoch: int
    text: str
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Got:
    """The snapshot of view `epoch` has arrived whole."""

    range: int
    epoch: int


Message = Command | Read | Ack | Data | Refused | Moved | Forward | Done | Behind | Snapshot | Got

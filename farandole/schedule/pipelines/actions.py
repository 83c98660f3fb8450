"""The data: what each rank of a pipeline does, in which order. Everything else here reads or
builds it.

    rank 0   F0 F1 F2 F3          B0    B1    B2    B3  U      GPipe, 3 stages, 4 micro-batches
    rank 1      F0 F1 F2 F3    B0    B1    B2    B3     U
    rank 2         F0 F1 F2 F3 B0 B1 B2 B3              U

An action names the stage, the micro-batch and the version of the weights it computes with. What
travels follows from it: the output of a forward goes to where the next stage of that micro-batch
lives, the gradient of a backward to where the stage before lives. So nothing else is written down,
and the checker, the simulator and the runtime cannot disagree about who sends what to whom.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from farandole.errors import UserError

Kind = Literal["F", "B", "I", "W", "U"]
"""Forward; backward; the two halves of a backward: of the input, of the weights; update."""


class Action(NamedTuple):
    """One thing that a rank does. An update is of all stages that the rank holds."""

    kind: Kind
    stage: int = -1  # an update has none
    micro: int = -1  # an update has none
    direction: int = 0  # which copy of the whole model: GEMS has two, in opposite directions
    version: int = 0  # of the weights: that it computes with, or that it makes

    def __str__(self) -> str:
        return "U" if self.kind == "U" else f"{self.kind}{self.micro}"


def forward(stage: int, micro: int, direction: int = 0, version: int = 0) -> Action:
    return Action("F", stage, micro, direction, version)


def backward(stage: int, micro: int, direction: int = 0, version: int = 0) -> Action:
    return Action("B", stage, micro, direction, version)


def update(version: int) -> Action:
    """Makes `version`, from the gradients of all backwards since the update before."""
    return Action("U", version=version)


@dataclass(frozen=True)
class Pipeline:
    """Who does what when, for one step of a synchronous scheme or a whole run of another.

    `homes[direction][stage]` are the ranks that hold a stage. With several of them they take turns:
    micro-batch i is computed by number i modulo their count. Ranks that hold the same stage add up
    their gradients in every update, all of them together.
    """

    name: str
    micros: int
    homes: tuple[tuple[tuple[int, ...], ...], ...]
    actions: tuple[tuple[Action, ...], ...] = field(repr=False)  # by rank

    def __post_init__(self) -> None:
        if self.micros < 1:
            raise UserError(f"{self.name}: {self.micros} micro-batches; give at least 1.")

    @property
    def ranks(self) -> int:
        return len(self.actions)

    @property
    def stages(self) -> int:
        return len(self.homes[0])

    def home(self, stage: int, micro: int, direction: int = 0) -> int:
        """The rank that computes this stage for this micro-batch."""
        # The one rule for who computes what. Sender and receiver both use it, so a message needs no
        # address beside its micro-batch.
        ranks = self.homes[direction][stage]
        return ranks[micro % len(ranks)]

    def held(self, rank: int) -> tuple[int, ...]:
        """The stages whose weights a rank holds, in order."""
        return tuple(
            stage
            for stage in range(self.stages)
            if any(rank in direction[stage] for direction in self.homes)
        )

    def holders(self, stage: int) -> tuple[int, ...]:
        """The ranks that hold a stage, of all directions, in order."""
        return tuple(sorted({rank for direction in self.homes for rank in direction[stage]}))


def one_each(stages: int) -> tuple[tuple[int, ...], ...]:
    """Stage s on rank s."""
    return tuple((stage,) for stage in range(stages))


def opposite(stages: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """GEMS: the first direction goes down the ranks, the second one up."""
    return one_each(stages), tuple((stages - 1 - stage,) for stage in range(stages))


def require_sizes(name: str, stages: int, micros: int) -> None:
    """The first line of every scheme."""
    if stages < 1:
        raise UserError(f"{name}: {stages} stages; give at least 1.")
    if micros < 1:
        raise UserError(f"{name}: {micros} micro-batches; give at least 1.")

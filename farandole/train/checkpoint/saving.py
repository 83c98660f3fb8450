"""All ranks save and load one checkpoint together.

Rank 0 writes what all ranks share, each rank what is its own. If any of them fails, all of them
raise the same error: a rank that went on alone would hang the others in the next collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from safetensors import SafetensorError

from farandole.comm import Group
from farandole.errors import CheckpointError
from farandole.train.checkpoint import checkpoint
from farandole.train.checkpoint.background_save import BackgroundSaves
from farandole.train.checkpoint.contents import check_contents
from farandole.train.checkpoint.manifest import Entry
from farandole.train.checkpoint.places.destination import Destination, Draft
from farandole.train.checkpoint.places.folder_destination import FolderDraft
from farandole.train.checkpoint.places.source import Source
from farandole.train.checkpoint.snapshot import PartSnapshot

T = TypeVar("T")

_FALLBACK_HINT: Final = (
    " To go on from the last good one, load it by its path, or pass --fallback to `farandole run` "
    "or fallback=True to fd.init."
)


class RanksChangedError(CheckpointError):
    """In an elastic job ranks came or went during a save: it is to be repeated, by all of them."""


def save_together(
    group: Group,
    destination: Destination,
    shared: Mapping[str, Any],
    own: Mapping[str, Any],
    parts: Mapping[str, Any],
    *,
    metrics: Mapping[str, float],
    background: BackgroundSaves | None = None,
    on_commit: Callable[[Path | str], None] = lambda path: None,
) -> Path | str:
    """Saves into a new checkpoint; returns its path, the same on every rank.

    `shared` is the same on all ranks and written by rank 0; `own` and `parts`, by each rank. Names
    in `parts` must differ between ranks. The `metrics` are rank 0's.

    With `background` it returns when the state is copied: what is written later goes wrong later.
    Without it the destination must be a folder. `on_commit` is called on rank 0 with the path when
    the checkpoint is there, perhaps in another thread.

    Raises `CheckpointError` on every rank when any rank could not write, or when another job saves
    into the same place, and `RanksChangedError` when a rank was lost.
    """
    generation = group.generation
    take_together(group, destination)
    name: str = group.broadcast_json(destination.next_name() if group.rank == 0 else "")
    mine = {f"rank-{group.rank}": own, **parts, **(shared if group.rank == 0 else {})}
    begun: list[Draft] = []
    copied: dict[str, PartSnapshot] = {}

    def begin() -> str:
        if group.rank != 0:
            return ""
        called = destination.begin(name)
        begun.append(destination.draft(called))
        return called

    def copy() -> None:
        assert background is not None
        copied.update(background.take(mine))

    def commit(entries: Sequence[Entry]) -> str:
        named = destination.commit(called, name, entries, metrics)
        begun.clear()
        on_commit(destination.path_of(named))
        return named

    def run(step: Callable[[], T]) -> list[T]:
        return _all_or_none(group, destination, name, step)

    # Each step is all or none: its answers are gathered before the next begins. So no rank writes
    # into a draft that rank 0 could not make, and rank 0 never commits while a part is missing.
    try:
        called = run(begin)[0]
        draft = destination.draft(called)
        if background is not None:
            run(copy)
            begun.clear()  # it belongs to the background from here on
            background.begin(group, destination, name, draft, copied, commit)
            return destination.path_of(name)
        assert isinstance(draft, FolderDraft)
        folder = draft.path
        entries = run(lambda: checkpoint.write_parts(folder, mine))
        # A rank that was lost may have been rank 0, with the parts that all share. From here on
        # all parts are there; what is left is their name.
        _require_same_ranks(group, generation, name)
        named = run(lambda: commit(entries) if group.rank == 0 else "")
        if not named[0]:  # the one that had to give it was lost
            raise RanksChangedError(f"rank 0 was lost while it saved {name}.")
        return destination.path_of(named[0])
    finally:
        for left in begun:  # whatever the error was
            left.discard()


def _require_same_ranks(group: Group, generation: int, name: str) -> None:
    """*Together.* Raises `RanksChangedError` on all ranks if ranks have changed on any of them."""
    if group.units is not None and any(group.gather_json(group.generation != generation)):
        raise RanksChangedError(f"a rank was lost during the save of {name}.")


def take_together(group: Group, destination: Destination, *, required: bool = True) -> None:
    """Rank 0 makes sure that this run, and no other, saves there.

    Raises `CheckpointError` on every rank when another job does, and, if it is `required`, when
    that cannot be found out.
    """
    problem: str | None = None
    if group.rank == 0:
        try:
            destination.take()
        except CheckpointError as error:
            problem = str(error)
        except Exception as error:  # of a disk, or of whatever reaches the object store
            reason = checkpoint.out_of_room(error)
            problem = f"could not save to {destination.path_of('')}: {reason}" if required else None
    problem = group.broadcast_json(problem)
    if problem is not None:
        raise CheckpointError(problem)


def _all_or_none(
    group: Group, destination: Destination, name: str, step: Callable[[], T]
) -> list[T]:
    """Runs `step` on every rank and gathers the results; one failure is everyone's."""
    result: Any = None
    problem: str | None = None
    try:
        result = step()
    except CheckpointError as error:
        problem = str(error)
    except (OSError, SafetensorError) as error:
        problem = checkpoint.out_of_room(error)
    answers = group.gather_json([problem, result])
    for rank, (failed, _) in enumerate(answers):
        if failed is not None:
            reason = f"rank {rank}: {failed}"
            raise destination.not_saved(name, reason, tells_last=group.rank == 0)
    return [result for _, result in answers]


def load_together(
    group: Group, source: Source, *, fallback: bool = False
) -> tuple[str, dict[str, Any], list[str]] | None:
    """Reads the shared parts and this rank's own from a checkpoint, or the newest in a place.

    Returns which checkpoint that was, the parts, and what to tell the user; None: there is none.
    With `fallback`, a checkpoint in a place of many that is refused is passed over, and stays where
    it is.

    Raises `CheckpointError` on every rank when any rank could not read.
    """
    # Rank 0's list for all: another rank may see a newer checkpoint, or not yet see this one.
    asked_for, found = _listed(group, source)
    refused: list[str] = []
    for at, candidate in enumerate(found):
        older = None if asked_for else next(iter(found[at + 1 :]), None)
        with source.folder(group, candidate) as folder:
            reader = _Reader(source, candidate, folder, older, asked_for=asked_for)
            parts, problem = reader.read_together(group)
        if problem is None:
            return candidate, parts, [*refused, *reader.notes]
        refused.append(problem.message)
        if not fallback or asked_for:
            hint = "" if asked_for or problem.last_good is None else _FALLBACK_HINT
            raise CheckpointError(problem.message + hint)
    if refused:
        raise CheckpointError(f"{refused[0]} No checkpoint in {source} can be used.")
    return None


def _listed(group: Group, source: Source) -> tuple[bool, list[str]]:
    asked_for, problem = False, None
    found: list[str] = []
    if group.rank == 0:
        try:
            asked_for, found = source.candidates()
        except Exception as error:  # of a disk, a network, a store's own package
            problem = f"{source} cannot be read: {type(error).__name__}: {error}"
    asked_for, found, problem = group.broadcast_json([asked_for, found, problem])
    if problem is not None:
        raise CheckpointError(problem)
    return asked_for, found


class _Reader:
    """Reads one checkpoint, whose files are in `folder`."""

    def __init__(
        self, source: Source, candidate: str, folder: Path, older: str | None, *, asked_for: bool
    ) -> None:
        self._label = source.label(candidate)
        self._older = None if older is None else source.label(older)
        self._folder = folder
        self._asked_for = asked_for
        self.notes: list[str] = []

    def read_together(self, group: Group) -> tuple[dict[str, Any], _Problem | None]:
        own = f"rank-{group.rank}"
        parts: dict[str, Any] = {}
        answer: list[str] | None = None
        try:
            parts = checkpoint.read(
                self._folder, lambda name: not name.startswith("rank-") or name == own, self._check
            )
        except checkpoint.RefusedCheckpointError as error:
            # Gathered, not raised: files are read by every rank, and on a shared disk one of them
            # may see a file that another does not see yet.
            answer = self._refusal(error)
        for rank, failed in enumerate(group.gather_json(answer)):
            if failed is not None:
                message = failed[0] if group.size == 1 else f"rank {rank}: {failed[0]}"
                return {}, _Problem(message, failed[1] or None)
        return parts, None

    def _check(self, parts: Mapping[str, Any]) -> None:
        check_contents(parts)
        strange = ", ".join(checkpoint.not_finite(self._folder))
        if strange and not self._asked_for:
            raise ValueError(f"training had diverged, {strange} is not finite")
        if strange:
            self.notes.append(
                f"{self._label} was saved when training had diverged: {strange} is not finite."
            )

    def _refusal(self, error: checkpoint.RefusedCheckpointError) -> list[str]:
        """What to say, and which other one there is."""
        if self._folder == self._label:
            return [str(error), str(error.last_good or "")]
        # Of others in a store nothing is known yet but that they are there.
        hint = f"The one before it is {self._older}." if self._older else "There is no older one."
        message = f"checkpoint {self._label} is refused: {error.reason}. {hint}"
        return [message, str(self._older or "")]


@dataclass(frozen=True)
class _Problem:
    """Why a checkpoint is refused, the same on all ranks."""

    message: str
    last_good: str | None

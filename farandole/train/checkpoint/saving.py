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
from farandole.train.checkpoint.save_folder import SaveFolders
from farandole.train.checkpoint.snapshot import PartSnapshot

T = TypeVar("T")

_FALLBACK_HINT: Final = (
    " To go on from the last good one, load it by its path, or pass --fallback to `farandole run` "
    "or fallback=True to fd.init."
)


def save_together(
    group: Group,
    folders: SaveFolders,
    folder: Path,
    shared: Mapping[str, Any],
    own: Mapping[str, Any],
    parts: Mapping[str, Any],
    *,
    keep: int,
    background: BackgroundSaves | None = None,
) -> Path:
    """Saves into a new checkpoint in `folder`; returns its path, the same on every rank.

    `shared` is the same on all ranks and written by rank 0; `own` and `parts`, by each rank. Names
    in `parts` must differ between ranks. Of the checkpoints that are this run's, by `folders`, the
    newest `keep` stay.

    With `background` it returns when the state is copied: what is written later goes wrong later.

    Raises `CheckpointError` on every rank when any rank could not write, or when another job saves
    into the same folder.
    """
    lock_together(group, folders, folder)
    target: Path = folder / group.broadcast_json(
        checkpoint.next_name(folder) if group.rank == 0 else ""
    )
    mine = {f"rank-{group.rank}": own, **parts, **(shared if group.rank == 0 else {})}
    begun: list[Path] = []
    copied: dict[str, PartSnapshot] = {}

    def begin() -> str:
        if group.rank != 0:
            return ""
        begun.append(checkpoint.begin(target))
        return begun[0].name

    def write() -> Entry:
        return checkpoint.write_parts(folder / name, mine)

    def copy() -> None:
        assert background is not None
        copied.update(background.take(mine))

    def commit(entries: Sequence[Entry]) -> str:
        named = checkpoint.commit(folder / name, target, entries)
        begun.clear()
        folders.made(named)
        checkpoint.prune(folder, keep, folders.own_names(folder))
        return named.name

    # Each step is all or none: its answers are gathered before the next begins. So no rank writes
    # into a folder that rank 0 could not make, and rank 0 never commits while a part is missing.
    try:
        name = _all_or_none(group, target, begin)[0]
        if background is not None:
            _all_or_none(group, target, copy)
            begun.clear()  # it belongs to the background from here on
            background.begin(group, target, folder / name, copied, commit)
            return target
        entries = _all_or_none(group, target, write)
        named = _all_or_none(group, target, lambda: commit(entries) if group.rank == 0 else "")
        return folder / named[0]
    finally:
        for left in begun:  # whatever the error was
            checkpoint.discard(left)


def lock_together(
    group: Group, folders: SaveFolders, folder: Path, *, required: bool = True
) -> None:
    """Rank 0 locks `folder` for this run.

    Raises `CheckpointError` on every rank when another job has it, and, if it is `required`, when
    the folder cannot be made or locked.
    """
    problem: str | None = None
    if group.rank == 0:
        try:
            folders.lock(folder)
        except CheckpointError as error:
            problem = str(error)
        except OSError as error:
            reason = checkpoint.out_of_room(error)
            problem = f"could not save to {folder}: {reason}" if required else None
    problem = group.broadcast_json(problem)
    if problem is not None:
        raise CheckpointError(problem)


def _all_or_none(group: Group, target: Path, step: Callable[[], T]) -> list[T]:
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
            if group.rank == 0:
                raise checkpoint.not_saved(target, f"rank {rank}: {failed}")
            raise CheckpointError(f"could not save to {target}: rank {rank}: {failed}")
    return [result for _, result in answers]


def load_together(
    group: Group, path: Path, *, fallback: bool = False
) -> tuple[Path, dict[str, Any], list[str]]:
    """Reads the shared parts and this rank's own from a checkpoint, or the newest in a folder.

    Returns which checkpoint that was, the parts, and what to tell the user. With `fallback`, a
    checkpoint in a folder that is refused is passed over, and stays where it is.

    Raises `CheckpointError` on every rank when any rank could not read.
    """
    asked_for = checkpoint.is_checkpoint(path)
    found = [path] if asked_for else [path / name for name in reversed(checkpoint.names(path))]
    # Rank 0's list for all: another rank may see a newer checkpoint, or not yet see this one.
    asked_for, found = group.broadcast_json([asked_for, [str(source) for source in found]])
    if not found:
        raise CheckpointError(f"there is no checkpoint in {path}.")
    refused: list[str] = []
    for source in found:
        parts, notes, problem = _read_together(group, Path(source), asked_for=asked_for)
        if problem is None:
            return Path(source), parts, [*refused, *notes]
        refused.append(problem.message)
        if not fallback or asked_for:
            hint = "" if asked_for or problem.last_good is None else _FALLBACK_HINT
            raise CheckpointError(problem.message + hint)
    raise CheckpointError(f"{refused[0]} No checkpoint in {path} can be used.")


def _read_together(
    group: Group, source: Path, *, asked_for: bool
) -> tuple[dict[str, Any], list[str], _Problem | None]:
    own = f"rank-{group.rank}"
    parts: dict[str, Any] = {}
    notes: list[str] = []

    def check(parts: Mapping[str, Any]) -> None:
        check_contents(parts)
        strange = ", ".join(checkpoint.not_finite(source))
        if strange and not asked_for:
            raise ValueError(f"training had diverged, {strange} is not finite")
        if strange:
            notes.append(f"{source} was saved when training had diverged: {strange} is not finite.")

    answer: list[str] | None = None
    try:
        parts = checkpoint.read(
            source, lambda name: not name.startswith("rank-") or name == own, check
        )
    except checkpoint.RefusedCheckpointError as error:
        # Gathered, not raised: files are read by every rank, and on a shared disk one of them may
        # see a file that another does not see yet.
        answer = [str(error), str(error.last_good or "")]
    for rank, failed in enumerate(group.gather_json(answer)):
        if failed is not None:
            message = failed[0] if group.size == 1 else f"rank {rank}: {failed[0]}"
            return {}, [], _Problem(message, failed[1] or None)
    return parts, notes, None


@dataclass(frozen=True)
class _Problem:
    """Why a checkpoint is refused, the same on all ranks."""

    message: str
    last_good: str | None

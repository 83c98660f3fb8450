"""Old races and runs, read back from their folders: drawn again, merged, or compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
from rich.console import Console

from farandole.errors import UserError
from farandole.race.options import check_price
from farandole.race.record import NAME, RaceRecord, read_record
from farandole.race.results import show
from farandole.report.history import read_history
from farandole.report.lane import Lane
from farandole.report.metrics import FILE_NAME
from farandole.report.page import write_report
from farandole.report.standing import require_metric
from farandole.report.target import Target

DEFAULT_OUT = Path("runs/report")


@dataclass(frozen=True)
class Collected:
    """What a folder has: the runs of a race, or one run, which has no record."""

    folder: Path
    lanes: tuple[Lane, ...]
    record: RaceRecord | None = None


def draw(
    folders: Sequence[Path], out: Path | None, target: str | None, price: float | None = None
) -> int:
    """Writes the report and shows its table. Raises `UserError` for folders that have nothing."""
    check_price(price)
    given = [folder.resolve() for folder in folders]
    twice = next((folder for folder in given if given.count(folder) > 1), None)
    if twice is not None:
        raise UserError(f"{twice} is given twice. Its runs would count twice.")
    found = [collect(folder) for folder in folders]
    goal = _target(found, target)
    lanes = join(found)
    if goal is not None and target is not None:
        # Before anything is drawn over: with a target of the race itself the page says it.
        require_metric(goal, [lane.history for lane in lanes])
    if price is not None:
        lanes = [replace(lane, price=price) for lane in lanes]
    place = out or (folders[0] if len(folders) == 1 else DEFAULT_OUT)
    facts = dict(found[0].record.facts) if len(found) == 1 and found[0].record else {}
    facts |= {"folders": ", ".join(map(str, folders))} if len(folders) > 1 else {}
    report = write_report(place, lanes, goal, facts)
    show(lanes, goal, Console())
    click.echo(f"report: {report}")
    return 0


def collect(folder: Path) -> Collected:
    """Raises `UserError` where there is neither a race nor a run."""
    if (folder / NAME).is_file():
        record = read_record(folder)
        lanes = record.lanes(folder)
        if not lanes:
            raise UserError(f"no run of the race in {folder} is over: there is nothing to draw.")
        return Collected(folder, tuple(lanes), record)
    if not (folder / FILE_NAME).is_file():
        raise UserError(
            f"{folder} is the folder of neither a race ({NAME}) nor a run ({FILE_NAME}). "
            f"{_what_else(folder)}"
        )
    history = read_history(folder / FILE_NAME)
    seed = history.start.get("seed")
    lane = Lane(
        history.sync,
        history.size,
        "ok" if history.finished else "unfinished",
        history,
        layout=history.layout,
        seed=seed if isinstance(seed, int) else None,
        folder=folder,
    )
    return Collected(folder, (lane,))


def _what_else(folder: Path) -> str:
    """What may have been meant by a folder that has nothing to draw."""
    inside = [path.parent for name in (NAME, FILE_NAME) for path in folder.glob(f"*/{name}")]
    if inside:
        newest = sorted(set(inside), key=lambda path: path.stat().st_mtime)[-3:]
        return f"Give folders in it, such as {' '.join(map(str, newest))}."
    return "Those are in runs/, if nobody has said another place with --runs."


def join(found: Sequence[Collected]) -> list[Lane]:
    """The runs of all folders. What may not be merged gets the name of its folder."""
    if len(found) == 1:
        return list(found[0].lanes)
    if _are_alike(found):
        return [lane for collected in found for lane in collected.lanes]
    return [
        replace(lane, sync=f"{lane.sync or 'script'} @ {collected.folder.name}")
        for collected in found
        for lane in collected.lanes
    ]


def _are_alike(found: Sequence[Collected]) -> bool:
    """Whether all are races of one script under the same settings. Seeds may differ."""
    records = [collected.record for collected in found]
    first = records[0]
    return first is not None and all(
        record is not None
        and record.command == first.command
        and _settings(record) == _settings(first)
        for record in records
    )


def _settings(record: RaceRecord) -> dict[str, object]:
    return {key: value for key, value in record.settings.items() if key != "seed"}


def _target(found: Sequence[Collected], given: str | None) -> Target | None:
    """As given, or the one that all races have. Raises `UserError` where they differ."""
    if given is not None:
        return Target.parse(given)
    targets = {c.record.target for c in found if c.record is not None and c.record.target}
    if len(targets) > 1:
        raise UserError(
            f"the races have different targets: {', '.join(sorted(targets))}. Say which one with "
            "--target."
        )
    return Target.parse(targets.pop()) if targets else None

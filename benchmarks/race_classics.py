"""One race over all strategies, and four curves of the literature redrawn on our data.

    python benchmarks/race_classics.py strategies     every strategy over a simulated link
    python benchmarks/race_classics.py adacomm        AdaComm against fixed periods
    python benchmarks/race_classics.py staleness      a staleness bound against time
    python benchmarks/race_classics.py pipelines      GPipe and PipeDream against data parallelism
    python benchmarks/race_classics.py large_batch    a large batch with and without warm-up
    python benchmarks/race_classics.py all            all of these
    python benchmarks/race_classics.py draw           figures and the page, from what is kept

Each piece consists of real `farandole race`s on two workers (four for staleness), whose folders are
under --runs. A race that was begun goes on where it stopped: `--seeds 1` and later `--seeds 3` make
pieces of a few minutes. The points of all runs are kept in results/race_classics_<piece>.json,
figures and the page of the race over all strategies in docs/classics/; docs/classics.md, which is
written from them, says what they show. --tiny tries all of it with a few steps; give --runs,
--results and --docs other folders with it. Needs Fashion-MNIST (on Debian: apt install
dataset-fashion-mnist).
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from classics.figures import draw_all
from classics.plan import PIECES, Race
from classics.results import lanes_of, median_to_target, race_in, read_json, read_race
from classics.text import page
from common import RESULTS, save

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "classics"
LARGEST_PAGE = 1_500_000  # bytes


def run_race(race: Race, folder: Path, seeds: int) -> Path:
    """Begins the race, or goes on with it. Returns its folder."""
    begun = race_in(folder)
    words = ["--resume", shown(begun)] if begun else ["--runs", shown(folder), *race.command()]
    command = [sys.executable, "-m", "farandole", "race", "--seeds", str(seeds), *words]
    code = subprocess.run(command, cwd=ROOT).returncode
    # 1: a lane has failed, as some are expected to; the page says why.
    if code not in (0, 1):
        sys.exit(
            f"{race.name}: farandole race ended with {code}. The same command goes on with it."
        )
    found = race_in(folder)
    assert found is not None
    return found


def shown(path: Path) -> str:
    """As the page shows it: below the root without the place of the root."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def run_piece(piece: str, args: argparse.Namespace) -> None:
    races: dict[str, Any] = {}
    for planned in PIECES[piece]:
        race = planned.tiny() if args.tiny else planned
        if not args.only or race.name in args.only:
            run_race(race, args.runs / race.name, args.seeds or race.seeds)
        if (folder := race_in(args.runs / race.name)) is not None:
            races[race.name] = read_race(folder)
    for name, race in races.items():
        for lane, runs in lanes_of(race).items():
            seconds = median_to_target(runs)
            said = "never" if seconds is None else f"{seconds:.1f} s"
            print(f"{name}, {lane}: {race['target']} after {said}, {len(runs)} run(s)")
    save(f"race_classics_{piece}", {"races": races}, args.results)


def draw(args: argparse.Namespace) -> None:
    """What there is: pieces that were not run are left out."""
    args.docs.mkdir(parents=True, exist_ok=True)
    kept = {piece: read_json(args.results / f"race_classics_{piece}.json") for piece in PIECES}
    pieces = {piece: found for piece, found in kept.items() if found}
    for path in draw_all(pieces, args.docs):
        print(f"drawn: {path}")
    copy_page(args)
    written = args.docs.with_suffix(".md")
    written.write_text(page(pieces, args.docs))
    print(f"written: {written}")


def copy_page(args: argparse.Namespace) -> None:
    """That of the race over all strategies."""
    folder = race_in(args.runs / PIECES["strategies"][0].name)
    if folder is None:
        print("race.html stays as it is: the runs of `strategies` are not here")
        return
    report = folder / "report.html"
    if report.stat().st_size > LARGEST_PAGE:
        sys.exit(f"{report} has {report.stat().st_size} bytes, more than {LARGEST_PAGE}.")
    shutil.copyfile(report, args.docs / "race.html")
    print(f"page: {args.docs / 'race.html'}, {report.stat().st_size / 1e6:.2f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("piece", choices=[*PIECES, "all", "draw"])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "classics")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=DOCS)
    parser.add_argument("--seeds", type=int, help="of each lane, in all [those of the plan]")
    parser.add_argument("--only", nargs="+", metavar="RACE", help="races of the piece to run [all]")
    parser.add_argument("--tiny", action="store_true", help="a few steps: does it all work?")
    args = parser.parse_args()
    args.runs = args.runs.resolve()  # races are started in the root
    if args.piece != "draw":
        for piece in PIECES if args.piece == "all" else [args.piece]:
            run_piece(piece, args)
    if args.piece in ("all", "draw"):
        draw(args)


if __name__ == "__main__":
    main()

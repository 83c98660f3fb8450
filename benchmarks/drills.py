"""What happens when something goes wrong? Every fault of a table, against real jobs.

    python benchmarks/drills.py                       the whole table; its result is kept
    python benchmarks/drills.py --only 'server|race'  the drills whose name matches; nothing is kept
    python benchmarks/drills.py --list

A drill starts a job, waits until its ranks have reached a phase, strikes, and looks: how many
seconds until the error or until training goes on, the exit code, who was named, and what was left
(processes, shared memory, sockets, network namespaces, files). Verdicts are written one by one; a
table that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import sys
from pathlib import Path

from common import save
from faults.book import Book
from faults.page import write_page
from faults.report import line, summary, without_output
from faults.table import drills, selection


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="PATTERN", help="drills whose name matches")
    parser.add_argument("--selection", action="store_true", help="the few that the tests run")
    parser.add_argument("--list", action="store_true", help="show the names and end")
    parser.add_argument("--jobs", type=int, default=2, help="drills at a time")
    parser.add_argument("--fresh", action="store_true", help="forget verdicts of an earlier table")
    parser.add_argument("--failed", action="store_true", help="those again that broke a promise")
    parser.add_argument("--folder", type=Path, default=Path("runs/drills"), help="of the verdicts")
    args = parser.parse_args()
    rows = selection() if args.selection else drills()
    chosen = [drill for drill in rows if re.search(args.only, drill.name)]
    if args.list:
        print("\n".join(drill.name for drill in chosen))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the drills under way end, too
    if args.fresh:
        shutil.rmtree(args.folder, ignore_errors=True)
    book = Book(args.folder)
    for done, (drill, verdict) in enumerate(book.run(chosen, args.jobs, args.failed), 1):
        print(f"{done}/{len(chosen)} {line(drill, verdict)}", flush=True)
    verdicts = {drill.name: book.read(drill) for drill in chosen}
    print(summary(verdicts))
    if not args.only and not args.selection:
        save("drills", {"drills": [without_output(found) for found in verdicts.values() if found]})
        write_page()
    sys.exit(any(verdict is None or verdict["broken"] for verdict in verdicts.values()))


if __name__ == "__main__":
    main()

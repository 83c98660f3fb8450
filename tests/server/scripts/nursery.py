"""Starts workers, one for each line of JSON on its input, and prints their process ids.

They are forked from this process, which has imported everything already, because that is what takes
long. A worker adds 1 to its own row in every clock, reads all rows, and reports to a file how far
it is; at the end, what it has read, or the error that ended it. At some clock it may send itself a
signal.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch

from farandole.errors import CommError
from farandole.server import Store


def report(path: Path, what: object) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(what))
    draft.rename(path)


def work(
    address: str,
    key_file: str,
    folder: str,
    rank: int,
    workers: int,
    staleness: int | None,
    clocks: int,
    signal_at: int,
    signal_name: str,
) -> None:
    place = Path(folder)
    seen = []
    with Store(address, key_file, rank=rank) as store:
        store.create("rows", workers, dtype="int64")
        while store.clock < clocks:
            own = torch.tensor([rank])
            store.start_push("rows", torch.tensor([1]), rows=own, ticks=True)
            store.tick()
            try:
                rows = store.get("rows", staleness=staleness)
            except CommError as error:
                report(place / f"{rank}.end", str(error))
                return
            seen.append([store.clock, rows.view(-1).tolist()])
            report(place / f"{rank}.clock", store.clock)
            if store.clock == signal_at:
                os.kill(os.getpid(), signal.Signals[signal_name])
    report(place / f"{rank}.end", seen)


torch.set_num_threads(1)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that nobody need ask how they ended
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        work(**json.loads(line))
        os._exit(0)
    print(pid, flush=True)

"""The last check of `farandole doctor`: two workers add numbers, for real, and measure their links.

As a module this file is what the workers run: `python -m farandole.doctor.two_workers REPORT`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from farandole.doctor.checks import Finding
from farandole.environment import LINK

if TYPE_CHECKING:
    from farandole.comm.calibration import Unmeasured
    from farandole.schedule import Link

_TIMEOUT = timedelta(seconds=60)


def check_all_reduce(workers: int = 2) -> tuple[Finding, ...]:
    """Starts workers as `farandole run` does, lets them add numbers, and measures their links."""
    from farandole.comm.calibration import read_measured
    from farandole.launch.launcher import Job, launch

    name = f"all-reduce, {workers} workers"
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="farandole-doctor-") as folder:
        report = Path(folder) / "report.json"
        outcome = launch(Job(workers, ("-m", "farandole.doctor.two_workers", str(report))))
        if outcome.stopped_by is not None:
            return (Finding(name, "broken", f"stopped by {outcome.stopped_by}", "let it finish"),)
        failure = outcome.failure
        if failure is not None:
            hint = f"read what the workers said in {outcome.logs}"
            return (Finding(name, "broken", str(failure), hint),)
        found = json.loads(report.read_text())
    sums = Finding(
        name,
        "ok",
        f"right; {found['bytes'] / 2**20:g} MiB over {found['backend']} in "
        f"{found['seconds'] * 1000:.1f} ms; {time.perf_counter() - begin:.1f} s with start-up",
    )
    return (
        sums,
        *(check_link(kind, read_measured(measured)) for kind, measured in found["links"].items()),
    )


def check_link(kind: str, link: Link | Unmeasured) -> Finding:
    """What a message costs, and what `auto` makes of it."""
    from farandole.comm.choice import cheapest
    from farandole.comm.transports.base import TYPICAL_LINK
    from farandole.schedule import Link

    name = "link, shared memory" if kind == "shm" else f"link, {kind}"
    message = f"{link.seconds_per_message * 1e6:.0f} µs a message"
    if isinstance(link, Link):
        cost = f"{message}, {_gigabytes(link)}"
    else:
        cost = f"{message}, bandwidth not measured: {link.reason}"
    if kind == "shm":
        return Finding(name, "ok", f"{cost}; auto: native at any size")
    if not isinstance(link, Link):
        usual = f"{TYPICAL_LINK.seconds_per_message * 1e6:.0f} µs, {_gigabytes(TYPICAL_LINK)}"
        hint = f"run it again while the machine is idle, or set {LINK}=2e-4,1e-9 for jobs"
        return Finding(name, "warning", f"{cost}; auto takes it for a usual link: {usual}", hint)
    sizes = {"4 KiB": 2**12, "1 MiB": 2**20, "64 MiB": 2**26}
    chosen = ", ".join(f"{cheapest(8, size, link)[0]} at {text}" for text, size in sizes.items())
    return Finding(name, "ok", f"{cost}; auto for 8 such ranks: {chosen}")


def _gigabytes(link: Link) -> str:
    return f"{1e-9 / link.seconds_per_byte:.1f} GB/s"


def _trial(report: Path) -> None:
    """In a worker: rank r contributes r + 1 times the same numbers; their sum is known."""
    import torch

    from farandole.comm.calibration import measure
    from farandole.errors import CommError
    from farandole.system.orphans import end_with_launcher
    from farandole.worker.environment import detect
    from farandole.worker.failure import record_uncaught
    from farandole.worker.join import c10d_world, join, leave

    record_uncaught()
    end_with_launcher(os.environ)
    assignment = detect(os.environ)
    own_gpu = torch.cuda.device_count() >= assignment.local_size
    device = torch.device("cuda", assignment.local_rank) if own_gpu else torch.device("cpu")
    group = join(assignment, device, ranks_per_gpu=1, timeout=_TIMEOUT)
    numbers = torch.arange(2**20, dtype=torch.float32, device=device)
    expected = numbers * (assignment.size * (assignment.size + 1) // 2)
    seconds = []
    for _ in range(5):
        mine = numbers * (assignment.rank + 1)
        begin = time.perf_counter()
        group.all_reduce(mine)
        # Comparing waits for the device, too.
        if not torch.equal(mine, expected):
            raise CommError(
                f"rank {assignment.rank} got a wrong sum from {assignment.size} workers."
            )
        seconds.append(time.perf_counter() - begin)
    transports = {"gloo": c10d_world(_TIMEOUT), group.transport.name: group.transport}
    links = {
        name: measure(transport, 0, 1) for name, transport in transports.items() if name != "c10d"
    }
    if assignment.rank == 0:
        found = {
            "bytes": numbers.nbytes,
            "backend": "NCCL" if own_gpu else group.transport.name,
            "seconds": min(seconds),
            "links": {name: asdict(link) for name, link in links.items()},
        }
        report.write_text(json.dumps(found))
    leave(group)


if __name__ == "__main__":
    _trial(Path(sys.argv[1]))

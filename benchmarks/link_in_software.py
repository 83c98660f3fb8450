"""A simulated link (`farandole run --link`) beside an emulated one (`farandole emulate`).

The same messages over both, at the same rate and delay: ping-pong between two ranks on two hosts,
and a ring all-reduce. The two kinds of link take turns for some rounds; the figures are the median
of all repeats of all rounds, their quartiles, and the fastest. Target: the ratio of the medians is
from 0.9 to 1.1 for 256 KiB and more. Where the kernel has no netem, both go without a delay. The
emulator needs root.

    python benchmarks/link_in_software.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import RESULTS, save, spread

import farandole as fd
from farandole.emulate.cluster import Cluster
from farandole.errors import UserError

RESULT_FILE = "BENCHMARK_RESULT_FILE"
KIBIBYTES = "64,256,1024,4096"
LOWEST, HIGHEST = 0.9, 1.1
JUDGED_FROM_KIBIBYTES = 256
TIMEOUT_SECONDS = 280
Seconds = dict[str, list[float]]
"""By pattern: those of all repeats."""
Figures = dict[str, dict[str, float]]


def measure(run: fd.Run, sizes: list[int], repeats: int) -> Seconds:
    """Seconds of each pattern on rank 0, by name."""
    found = {}
    for kibibytes in sizes:
        data = torch.zeros(kibibytes * 256)

        def ping_pong(data: torch.Tensor = data) -> None:
            if run.rank == 0:
                run.group.send(data, 1)
                run.group.receive(data, 1)
            else:
                run.group.receive(data, 0)
                run.group.send(data, 0)

        def all_reduce(data: torch.Tensor = data) -> None:
            # The same messages on both sides: `auto` may take gloo's own all-reduce on one of them.
            run.group.all_reduce(data, algorithm="ring")

        for name, work in (("ping_pong", ping_pong), ("all_reduce", all_reduce)):
            found[f"{name} {kibibytes} KiB"] = _seconds(run, work, repeats)
    return found


def _seconds(run: fd.Run, work: Callable[[], None], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats + 1):
        run.group.barrier()
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return times[1:]


def simulated(link: str, transport: str, words: list[str], file: Path) -> Seconds:
    command = [sys.executable, "-m", "farandole", "run", "-n", "2", "--pretend-hosts", "2"]
    command += ["--link", link, "--transport", transport, __file__, *words]
    subprocess.run(
        command, env={**os.environ, RESULT_FILE: str(file)}, timeout=TIMEOUT_SECONDS, check=True
    )
    return dict(json.loads(file.read_text()))


def emulated(rate: str, delay: str | None, words: list[str], file: Path) -> Seconds:
    with Cluster(2, rate, delay) as cluster:
        common = {RESULT_FILE: str(file), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
        common |= {"LOCAL_RANK": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        # So that the link is measured, and not found in the file of earlier jobs.
        common["XDG_CACHE_HOME"] = str(file.parent / "cache")
        command = [sys.executable, __file__, *words]
        ranks = [
            cluster.start(rank, command, env={**common, "RANK": str(rank)}) for rank in range(2)
        ]
        codes = [rank.wait(TIMEOUT_SECONDS) for rank in ranks]
    if any(codes):
        sys.exit(f"the ranks on the emulated hosts ended with {codes}")
    return dict(json.loads(file.read_text()))


def take_part(sizes: list[int], repeats: int) -> None:
    run = fd.init(folder=Path(os.environ[RESULT_FILE]).parent)
    found = measure(run, sizes, repeats)
    if run.rank == 0:
        Path(os.environ[RESULT_FILE]).write_text(json.dumps(found))


def both(
    rate: str, delay: str | None, words: list[str], rounds: int
) -> tuple[dict[str, Figures], str]:
    link = rate if delay is None else f"{rate},{delay}"
    times: dict[str, Seconds] = {}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="farandole-benchmark-") as folder:
            file = Path(folder) / "result.json"
            found = {"emulated": emulated(rate, delay, words, file)}
            for transport in ("c10d", "shm"):
                found[f"simulated_{transport}"] = simulated(link, transport, words, file)
        for side, patterns in found.items():
            for what, seconds in patterns.items():
                times.setdefault(side, {}).setdefault(what, []).extend(seconds)
    figures = {
        side: {what: {**spread(all_), "fastest": min(all_)} for what, all_ in patterns.items()}
        for side, patterns in times.items()
    }
    return figures, link


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--delay", default="1ms")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kibibytes", default=KIBIBYTES, metavar="N,…")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    args = parser.parse_args()
    if RESULT_FILE in os.environ:
        take_part([int(size) for size in args.kibibytes.split(",")], args.repeats)
        return
    words = ["--repeats", str(args.repeats), "--kibibytes", args.kibibytes]
    try:
        found, link = both(args.rate, args.delay, words, args.rounds)
    except UserError as error:
        print(f"without a delay: {error}")
        found, link = both(args.rate, None, words, args.rounds)
    ratios = {
        side: {
            what: {
                kind: times[what][kind] / found["emulated"][what][kind]
                for kind in ("median", "fastest")
            }
            for what in times
        }
        for side, times in found.items()
        if side != "emulated"
    }
    judged = [
        ratio["median"]
        for times in ratios.values()
        for what, ratio in times.items()
        if int(what.split()[1]) >= JUDGED_FROM_KIBIBYTES
    ]
    met = all(LOWEST <= ratio <= HIGHEST for ratio in judged)
    save(
        "link_in_software",
        {
            "link": link,
            "repeats": args.repeats,
            "rounds": args.rounds,
            "seconds": found,
            "ratio_to_emulated": ratios,
            "judged_from_kibibytes": JUDGED_FROM_KIBIBYTES,
            "target_ratio": [LOWEST, HIGHEST],
            "met": met,
        },
        args.out,
    )
    for what in found["emulated"]:
        seconds = "  ".join(
            f"{side} {1000 * times[what]['median']:7.2f} ms" for side, times in found.items()
        )
        print(f"{what:20} {seconds}")
    if not judged:
        print(f"no ratio: nothing has {JUDGED_FROM_KIBIBYTES} KiB or more")
        return
    print(f"ratio from {min(judged):.3f} to {max(judged):.3f} (target {LOWEST} to {HIGHEST})")


if __name__ == "__main__":
    main()

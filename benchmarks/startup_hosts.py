"""How long 4 workers take for two steps: on one host, and on two emulated hosts by real ssh.

From the start of `farandole run -H …` to its end, taking turns. It runs on the first emulated host:

    one host        4 workers there
    two hosts       2 workers there, and 2 on another host, through its agent
    both by ssh     2 workers on each of two other hosts
    fresh           as both by ssh, and each worker imports torch itself

Hosts are network namespaces of one machine: they share its cores, so that two hosts have no more
than one has, and their imports of torch compete. Target: two hosts take at most 1.5 times as long
as one. Needs root, and Debian's openssh-server.

    python benchmarks/startup_hosts.py --repeats 7
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import save, spread
from startup_workers import SCRIPT

from farandole.emulate.cluster import Cluster
from farandole.emulate.ssh_access import SshAccess

SIDES = {
    "one host": "emulated-0:4",
    "two hosts": "emulated-0:2,emulated-1:2",
    "both by ssh": "emulated-1:2,emulated-2:2",
    "fresh": "emulated-1:2,emulated-2:2",
}
TIMEOUT_SECONDS = 300.0


def seconds_of(cluster: Cluster, side: str, script: Path, path: str) -> float:
    command = [sys.executable, "-m", "farandole", "run", "-H", SIDES[side], str(script)]
    # The emulator's variables are those that torchrun would set: each worker has its own.
    unset = [word for name in cluster.variables(0) for word in ("-u", name)]
    variables = {"PATH": path, "CUDA_VISIBLE_DEVICES": ""}
    variables |= {"FARANDOLE_FORK": "0"} if side == "fresh" else {}
    begin = time.perf_counter()
    process = cluster.start(
        0,
        ["env", *unset, *command],
        env=variables,
        cwd=script.parent,
        stdout=subprocess.DEVNULL,
    )
    code = process.wait(TIMEOUT_SECONDS)
    if code:
        sys.exit(f"{side}: the launcher ended with exit code {code}")
    return time.perf_counter() - begin


def measure(repeats: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory(prefix="farandole-benchmark-") as text, Cluster(3) as cluster:
        folder = Path(text)
        script = folder / "two_steps.py"
        script.write_text(SCRIPT)
        access = SshAccess(folder / "ssh")
        for host in (1, 2):
            access.start_server(cluster, host)
        path = f"{access.path_folder}:{os.environ['PATH']}"
        for side in SIDES:
            seconds_of(cluster, side, script, path)  # files come into the system's cache
        for _ in range(repeats):
            for side, found in seconds.items():
                found.append(seconds_of(cluster, side, script, path))
                print(f"{side}: {found[-1]:.2f} s", flush=True)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--save", default="startup_hosts", metavar="NAME")
    args = parser.parse_args()
    seconds = measure(args.repeats)
    one = seconds["one host"]
    ratios = {
        side: spread([a / b for a, b in zip(found, one, strict=True)])
        for side, found in seconds.items()
        if side != "one host"
    }
    save(
        args.save,
        {
            "workers": 4,
            "steps": 2,
            "seconds": {side: spread(found) for side, found in seconds.items()},
            "ratio_to_one_host": ratios,
            "target_ratio": 1.5,
            "repeats": args.repeats,
        },
    )
    for side, found in ratios.items():
        print(f"{side} / one host: {found['median']:.2f}")


if __name__ == "__main__":
    main()

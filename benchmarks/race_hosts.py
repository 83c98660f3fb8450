"""A race over two emulated hosts with a rate, by real ssh, beside the same race on one host.

The same command, script and target twice, in network namespaces of one machine:

    one host     farandole race -n 4 …                            all four workers on the first
    two hosts    farandole race -H emulated-0:2,emulated-1:2 …    two on each, over the link

Kept: both tables as the race itself wrote them (summary.json), with the link that it measured. It
shows whether the order of the schemes changes with the link. Needs root, and openssh-server.

    python benchmarks/race_hosts.py --rate 20mbit
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import save

from farandole.emulate.cluster import Cluster
from farandole.emulate.ssh_access import SshAccess

SCRIPT = Path(__file__).parents[1] / "examples" / "digits.py"
SYNCS = ("allreduce", "daso", "local:every=8")
SIDES = {"one_host": ["-n", "4"], "two_hosts": ["-H", "emulated-0:2,emulated-1:2"]}
TIMEOUT_SECONDS = 900.0


def race(cluster: Cluster, access: SshAccess, folder: Path, where: list[str], target: str) -> Any:
    """Returns the summary that the race has written."""
    schemes = [word for sync in SYNCS for word in ("--sync", sync)]
    words = [sys.executable, "-m", "farandole", "race", *where, *schemes, "--target", target]
    # The emulator's variables are those that torchrun would set: each worker has its own.
    unset = [word for name in cluster.variables(0) for word in ("-u", name)]
    folder.mkdir()
    process = cluster.start(
        0,
        ["env", *unset, *words, str(SCRIPT)],
        env={
            "PATH": f"{access.path_folder}:{os.environ['PATH']}",
            "XDG_CACHE_HOME": str(folder / "cache"),  # so that the link is measured now
            "CUDA_VISIBLE_DEVICES": "",
        },
        cwd=folder,
    )
    code = process.wait(TIMEOUT_SECONDS)
    if code:
        sys.exit(f"the race {' '.join(where)} ended with exit code {code}")
    (run,) = (folder / "runs").iterdir()
    return json.loads((run / "summary.json").read_text())


KEPT = (
    *("label", "place", "workers", "outcome", "seconds_to_target", "best", "samples_per_second"),
    *("waited_share", "bytes_sent", "total_seconds", "link"),
)


def table(summary: Any) -> dict[str, Any]:
    """What the race shows on the terminal."""
    lanes = [{key: lane[key] for key in KEPT} for lane in summary["lanes"]]
    return {"headline": summary["headline"], "lanes": lanes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="20mbit")
    parser.add_argument("--target", default="accuracy=0.95")
    parser.add_argument("--save", default="race_hosts", metavar="NAME")
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="farandole-benchmark-") as text,
        Cluster(2, rate=args.rate) as cluster,
    ):
        folder = Path(text)
        access = SshAccess(folder / "ssh")
        words = access.server(cluster.names[1], cluster.addresses[1], 22)
        cluster.start(1, words, stderr=subprocess.DEVNULL)
        found = {
            side: race(cluster, access, folder / side, where, args.target)
            for side, where in SIDES.items()
        }
    save(
        args.save,
        {
            "rate": args.rate,
            "target": args.target,
            "script": SCRIPT.name,
            **{side: table(summary) for side, summary in found.items()},
        },
    )


if __name__ == "__main__":
    main()

"""AccDP: several workers on one GPU, in images per second, against PyTorch's DDP and one worker.

ResNet-50, bf16 autocast, channels-last. In each job Farandole and DDP take turns over the same NCCL
(`gpu/accdp_worker.py`); one worker takes turns with a plain loop. Targets: at least 0.95 of DDP at
every point, 3 times one plain worker with 4 workers of batch 16, 1.4 times with 2 of batch 64.

    LD_PRELOAD=…/libnccl.so.2 python benchmarks/accdp.py          # NCCL 2.30 or later
    python benchmarks/accdp.py --save accdp_shared_memory         # an older one: no DDP to compare
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import save

WORKER = Path(__file__).parent / "gpu" / "accdp_worker.py"


def run_job(workers: int, cases: list[str], seconds: float) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "farandole", "run", "--per-gpu", str(workers)]
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "0", "FARANDOLE_RUNS": folder}
        try:
            subprocess.run(
                [*command, str(WORKER), str(out), *cases], env=environ, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            print(f"{workers} workers: stopped after {seconds:g} s", flush=True)
        return json.loads(out.read_text()) if out.exists() else []  # type: ignore[no-any-return]


def compile_beforehand(cases: list[str], seconds: float) -> None:
    """Each case in a process of its own, all at the same time: the jobs find it in the compiler's
    cache on disk. One after the other, and again in each job, they would take most of an hour."""
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "0"}
    begun = time.monotonic()
    under_way = []
    for case in cases:
        command = [sys.executable, str(WORKER), "-", case]
        under_way.append(subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL))
    for case, process in zip(cases, under_way, strict=True):
        try:
            process.wait(max(1.0, seconds - (time.monotonic() - begun)))
        except subprocess.TimeoutExpired:
            process.kill()
            print(f"{case}: not compiled within {seconds:g} s; its jobs will do it", flush=True)
    print(f"compiled {len(cases)} cases in {time.monotonic() - begun:.0f} s", flush=True)


def judge(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The targets: what was found, and whether it is enough."""
    plain = {
        (row["batch"], row["side"], row["compiled"]): row["images_per_second"]["plain"]
        for row in rows
        if row["workers"] == 1
    }
    for row in rows:
        alone = plain.get((row["batch"], row["side"], row["compiled"]))
        if alone is not None:
            row["times_one_plain_worker"] = row["images_per_second"]["farandole"] / alone
    ratios = [ratio for row in rows for key, ratio in row.items() if key.startswith("ratio_to_ddp")]

    def gain(workers: int, batch: int) -> float | None:
        found = [
            row.get("times_one_plain_worker")
            for row in rows
            if (row["workers"], row["batch"], row["side"], row["compiled"])
            == (workers, batch, 224, False)
        ]
        return found[0] if found else None

    return {
        "least_ratio_to_ddp": min(ratios) if ratios else None,
        "target_ratio_to_ddp": 0.95,
        "gain_4_workers_batch_16": gain(4, 16),
        "target_gain_4_workers_batch_16": 3.0,
        "gain_2_workers_batch_64": gain(2, 64),
        "target_gain_2_workers_batch_64": 1.4,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--sides", type=int, nargs="+", default=[224, 256])
    parser.add_argument("--modes", nargs="+", default=["eager", "compiled"])
    parser.add_argument("--seconds", type=float, default=300.0, help="limit for each job")
    parser.add_argument("--save", default="accdp", metavar="NAME")
    options = parser.parse_args()
    cases = [f"{b},{s},{m}" for m in options.modes for s in options.sides for b in options.batches]
    compiled = [case for case in cases if case.endswith(",compiled")]
    if compiled:
        compile_beforehand(compiled, options.seconds)
    rows: list[dict[str, Any]] = []
    try:
        for workers in options.workers:
            rows += run_job(workers, cases, options.seconds)
    finally:  # Ctrl-C: what is measured is kept
        verdict = judge(rows)
        print(json.dumps(verdict, indent=1))
        save(options.save, {**verdict, "rows": rows})


if __name__ == "__main__":
    main()
